-- Add the result of a step to the record with this token: PROCESSING, or what a sweep has made of that.
--
-- KEYS     1 record · 2 leases
-- ARGV     1 token, 7 bytes · 2 name of the step, after its length · 3 its value, packed
-- returns  'added' | 'kept': it was there, and stays, or a sweep failed the record | 'lost'
--include live.lua
local old = redis.call('GET', KEYS[1])
if not old or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
if old:sub(1, 1) == 'F' and bit.band(old:byte(2), 64) ~= 0 then return 'kept' end
if not old:find(LIVE) then return 'lost' end
if old:sub(1, 1) ~= 'P' and bit.band(old:byte(2), 4) == 0 then return 'lost' end
local at = extension(old)
while at <= #old do
  if old:sub(at, at) == 'S' and old:sub(at + 5, at + 4 + #ARGV[2]) == ARGV[2] then return 'kept' end
  at = past(old, at)
end
-- Nothing to remove: but a write that needs no memory comes first, so that a server without any
-- left takes the step, which has had its effect.
redis.call('ZREM', KEYS[2], '')
redis.call('SET', KEYS[1],
  old .. struct.pack('>c1I4', 'S', #ARGV[2] + #ARGV[3]) .. ARGV[2] .. ARGV[3], 'KEEPTTL')
return 'added'
