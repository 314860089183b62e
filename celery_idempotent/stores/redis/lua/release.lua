-- Give the key back: delete the PROCESSING or QUEUED record with this token.
--
-- KEYS     1 record · 2 leases · 3 interrupted · 4 token (of the bucket)
-- ARGV     1 token, 7 bytes · 2 ms until the retry of a record counts as lost, or ''
--          3 the note of an operator, an item, or ''
-- returns  'released'
--          'requeued': it was reserved or has a message, and is QUEUED until its retry is there
--          'interrupted': it stays
--          'lost'
--include live.lua
local old = redis.call('GET', KEYS[1])
local state = old and old:sub(1, 1)
if state ~= 'P' and state ~= 'Q' or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
local stays, at = false, extension(old)
local awaited = bit.band(old:byte(2), 16) ~= 0 or old:sub(at, at) == 'M'
local requeued = ARGV[2] ~= '' and awaited
while not requeued and not stays and at <= #old do
  stays, at = old:sub(at, at) == 'S', past(old, at)
end
if not requeued and not stays then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], KEYS[1])
  return 'released'
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if not requeued then
  old = swept(old, false)
  if ARGV[3] ~= '' then
    --include token.lua
    old = old:sub(1, 2) .. larger_token(KEYS[4], old, time) .. noted(old, ARGV[3]):sub(10)
  end
  interrupt(KEYS[2], KEYS[3], KEYS[1], old, now, old:byte(22))
  return 'interrupted'
end
local deadline = now + ARGV[2]
local new = 'Q' .. swept(old, false):sub(2, 15) .. struct.pack('>I6', now) .. old:sub(22, 23)
  .. struct.pack('>I6', deadline) .. old:sub(30)
local left = math.max(redis.call('PTTL', KEYS[1]), 0)
-- ZREM comes first, so that a server without memory left gives back what it let in.
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('SET', KEYS[1], new, 'PX', left + ARGV[2])
redis.call('ZADD', KEYS[2], deadline, KEYS[1])
return 'requeued'
