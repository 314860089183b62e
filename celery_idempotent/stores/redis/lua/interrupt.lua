-- Note that a crash took the owner of the PROCESSING record with this token.
--
-- KEYS     1 record · 2 leases · 3 interrupted
-- ARGV     1 token, 7 bytes
-- returns  {'interrupted', record} | {'lost'}
--include live.lua
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 1) ~= 'P' or old:sub(3, 9) ~= ARGV[1] then return {'lost'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
return {'interrupted', interrupt(KEYS[2], KEYS[3], KEYS[1], old, now, math.min(old:byte(22) + 1, 255))}
