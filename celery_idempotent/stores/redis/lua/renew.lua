-- Let the lease of the PROCESSING record with this token start anew.
--
-- KEYS     1 record · 2 leases
-- ARGV     1 token, 7 bytes · 2 lease, ms · 3 life of the record, ms
-- returns  'renewed' | 'lost'
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 1) ~= 'P' or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
local time = redis.call('TIME')
local deadline = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
local new = old:sub(1, 23) .. struct.pack('>I6', deadline) .. old:sub(30)
-- ZREM comes first, so that a server without memory left lets nobody lose a lease.
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('SET', KEYS[1], new, 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], deadline, KEYS[1])
return 'renewed'
