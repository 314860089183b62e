-- Delete the record whatever its state. The bucket's token stays: later claims get a larger one.
--
-- KEYS     1 record · 2 leases · 3 failures
-- ARGV     1 token that it must have, 7 bytes, or '' for any
-- returns  'forgotten' | 'none'
if ARGV[1] ~= '' then
  local old = redis.call('GET', KEYS[1])
  if not old or old:sub(3, 9) ~= ARGV[1] then return 'none' end
end
local deleted = redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('ZREM', KEYS[3], KEYS[1])
return deleted == 1 and 'forgotten' or 'none'
