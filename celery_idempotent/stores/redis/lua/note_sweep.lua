-- Note that a sweep ended just now.
--
-- KEYS     1 what says when the last one did
-- returns  'noted'
local time = redis.call('TIME')
-- DEL comes first, so that a server without memory left takes the note.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)))
return 'noted'
