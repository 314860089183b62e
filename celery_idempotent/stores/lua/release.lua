-- Give the key back: delete the PROCESSING record with this token.
--
-- KEYS     1 record · 2 leases
-- ARGV     1 token, 7 bytes
-- returns  'released' | 'lost'
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 1) ~= 'P' or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], KEYS[1])
return 'released'
