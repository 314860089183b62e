-- Take a tombstone away, or whatever came in its place when it was lost; leave the tombstone of another.
--
-- KEYS     1 entry · 2 generation (of the bucket)
-- ARGV     1 the tombstone's name, 8 bytes, or '' for none · 2 a new generation, 8 bytes
-- returns  'lifted'
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 1) ~= 'T' or old:sub(2) == ARGV[1] then redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[2], ARGV[2])
return 'lifted'
