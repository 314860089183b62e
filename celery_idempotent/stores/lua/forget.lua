-- Delete the record whatever its state. The bucket's token stays: later claims get a larger one.
--
-- KEYS     1 record · 2 leases · 3 failures
-- returns  'forgotten' | 'none'
local deleted = redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('ZREM', KEYS[3], KEYS[1])
return deleted == 1 and 'forgotten' or 'none'
