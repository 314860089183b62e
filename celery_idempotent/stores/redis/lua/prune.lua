-- Remove from an index the records that have expired, or are in another state by now.
--
-- KEYS     1 index · from 2 on: records that it names
-- ARGV     1 letter of the state
-- returns  how many were removed
local gone = 0
for n = 2, #KEYS do
  if redis.call('GETRANGE', KEYS[n], '0', '0') ~= ARGV[1] then gone = gone + redis.call('ZREM', KEYS[1], KEYS[n]) end
end
return gone
