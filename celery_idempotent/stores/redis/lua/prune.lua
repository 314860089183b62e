-- Drop the entries of an index of what ended badly that are past their retention; Redis expires the records.
--
-- KEYS     1 failures or interrupted
-- ARGV     1 how many at most
-- returns  how many were dropped
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #expired > 0 then redis.call('ZREM', KEYS[1], unpack(expired)) end
return #expired
