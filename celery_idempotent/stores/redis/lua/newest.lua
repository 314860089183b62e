-- Find the highest entries of some indexes: those of every index that may have one of the first so many.
--
-- KEYS     indexes
-- ARGV     1 the highest score, or '+inf' · 2 how many are wanted of all together, 0 for all · 3 of each at most
-- returns  for each such index: its number among KEYS, and names and scores
local tops, order = {}, {}
for i = 1, #KEYS do
  local top = redis.call('ZRANGE', KEYS[i], ARGV[1], '-inf', 'BYSCORE', 'REV', 'LIMIT', '0', '1', 'WITHSCORES')
  tops[i] = tonumber(top[2])
  order[#order + 1] = tops[i]
end
table.sort(order)
local least, found = ARGV[2] ~= '0' and order[#order + 1 - ARGV[2]] or 0, {}
for i = 1, #KEYS do
  if tops[i] and tops[i] >= least then
    local some = redis.call('ZRANGE', KEYS[i], ARGV[1], '-inf', 'BYSCORE', 'REV', 'LIMIT', '0', ARGV[3], 'WITHSCORES')
    found[#found + 1] = {i, some}
  end
end
return found
