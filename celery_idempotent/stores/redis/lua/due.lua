-- Find what is due in some indexes.
--
-- KEYS     leases, failures or interrupted, of one bucket each
-- ARGV     1 how many names of each index at most
-- returns  for each index that has any: its number among KEYS, and the names
local time = redis.call('TIME')
-- As text: making it of a number takes Redis longer than looking into an index that has nothing.
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local found = {}
for i = 1, #KEYS do
  local names = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', now, 'LIMIT', '0', ARGV[1])
  if #names > 0 then found[#found + 1] = {i, names} end
end
return found
