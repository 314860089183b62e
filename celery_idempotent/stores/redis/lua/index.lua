-- Index those of these records that are INTERRUPTED, as whoever interrupted them did not.
--
-- KEYS     1 interrupted · 2... records
-- returns  'indexed'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 2, #KEYS do
  local left = redis.call('PTTL', KEYS[i])
  if left > 0 and redis.call('GETRANGE', KEYS[i], 0, 0) == 'I' then
    redis.call('ZADD', KEYS[1], now + left, KEYS[i])
  end
end
return 'indexed'
