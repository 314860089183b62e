-- Delete the record. The bucket's token stays: later claims get a larger one.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 interrupted
-- ARGV     1 token that it must have, 7 bytes, or '' for any · 2 letter of the state likewise
-- returns  'forgotten' | 'none'
if ARGV[1] ~= '' or ARGV[2] ~= '' then
  local old = redis.call('GET', KEYS[1])
  if not old then return 'none' end
  if ARGV[1] ~= '' and old:sub(3, 9) ~= ARGV[1] then return 'none' end
  if ARGV[2] ~= '' and old:sub(1, 1) ~= ARGV[2] then return 'none' end
end
local deleted = redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('ZREM', KEYS[3], KEYS[1])
redis.call('ZREM', KEYS[4], KEYS[1])
return deleted == 1 and 'forgotten' or 'none'
