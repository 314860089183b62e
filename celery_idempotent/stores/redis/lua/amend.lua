-- Set the result of a step of the unfinished record with this token, or take it away, as an operator says.
--
-- KEYS     1 record · 2 leases · 3 interrupted
-- ARGV     1 token, 7 bytes · 2 name of the step, after its length · 3 its value, packed, or '' to take it away
--          4 what the operator did, packed
-- returns  'amended' | 'lost' | 'unreadable': written by a newer version
--include live.lua
--include notes.lua
local old = redis.call('GET', KEYS[1])
if not old or old:find(ENDED) or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
if not old:find(LIVE) or foreign(old) then return 'unreadable' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local at, rest = extension(old), #old + 1
while at <= #old do
  if old:sub(at, at) == 'S' and old:sub(at + 5, at + 4 + #ARGV[2]) == ARGV[2] then
    rest = past(old, at)
    break
  end
  at = past(old, at)
end
local step = ''
if ARGV[3] ~= '' then step = struct.pack('>c1I4', 'S', #ARGV[2] + #ARGV[3]) .. ARGV[2] .. ARGV[3] end
local notes, head, tail = notes_of(old:sub(1, at - 1) .. step .. old:sub(rest))
local new = with_notes(head, intervened(notes, ARGV[4], now), tail)

if old:sub(1, 1) == 'P' then
  interrupt(KEYS[2], KEYS[3], KEYS[1], new, now, old:byte(22))
else
  -- Nothing to remove: but a write that needs no memory comes first, as in checkpoint.lua.
  redis.call('ZREM', KEYS[2], '')
  redis.call('SET', KEYS[1], new, 'KEEPTTL')
end
return 'amended'
