-- Find entries between two scores in some indexes, the highest first.
--
-- KEYS     indexes
-- ARGV     1 the highest score, or '+inf' · 2 the lowest, or '-inf' · 3 how many of each index at most
-- returns  for each index that has any: its number among KEYS, and names and scores
local found = {}
for i = 1, #KEYS do
  local some = redis.call('ZRANGE', KEYS[i], ARGV[1], ARGV[2], 'BYSCORE', 'REV', 'LIMIT', '0', ARGV[3], 'WITHSCORES')
  if #some > 0 then found[#found + 1] = {i, some} end
end
return found
