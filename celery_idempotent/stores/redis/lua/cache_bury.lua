-- Put a tombstone in place of the entry: nothing is answered, and nobody fills, until it is lifted.
--
-- KEYS     1 entry · 2 generation (of the bucket)
-- ARGV     1 the tombstone's name, 8 bytes · 2 a new generation, 8 bytes · 3 life of the tombstone, ms
-- returns  'buried'
--
-- The new generation makes every ticket of the bucket worthless that was given before.
-- DEL comes first, so that a server without memory left takes the tombstone.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], 'T' .. ARGV[1], 'PX', ARGV[3])
return 'buried'
