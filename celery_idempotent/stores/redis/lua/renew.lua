-- Let the lease of the record with this token start anew: it is PROCESSING, or a sweep has made it something else.
--
-- KEYS     1 record · 2 leases · 3 interrupted, only after the answer 'interrupted': a slot that moves refuses keys
--          that do not exist, as those of an empty index
-- ARGV     1 token, 7 bytes · 2 lease, ms · 3 life of the record, ms
-- returns  'renewed' | 'lost' | 'interrupted': ask again, with the third key
local old = redis.call('GET', KEYS[1])
if not old or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
local state, flags = old:sub(1, 1), old:byte(2)
-- A sweep failed it. Its run is to settle it anew.
if state == 'F' and bit.band(flags, 64) ~= 0 then return 'renewed' end
local swept = (state == 'I' or state == 'Q') and bit.band(flags, 4) ~= 0
if state ~= 'P' and not swept then return 'lost' end
if state == 'I' and not KEYS[3] then return 'interrupted' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline = now + ARGV[2]
local new = old:sub(1, 23) .. struct.pack('>I6', deadline) .. old:sub(30)
if swept then new = struct.pack('>c1B', 'P', flags - 4) .. new:sub(3, 15) .. struct.pack('>I6', now) .. new:sub(22) end
-- ZREM comes first, so that a server without memory left lets nobody lose a lease.
redis.call('ZREM', KEYS[2], KEYS[1])
if state == 'I' then redis.call('ZREM', KEYS[3], KEYS[1]) end
redis.call('SET', KEYS[1], new, 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], deadline, KEYS[1])
return 'renewed'
