-- Note that the callbacks of the settled record with this token were sent.
--
-- KEYS     1 record · 2 leases
-- ARGV     1 token, 7 bytes
-- returns  'marked' (now or before) | 'lost'
local old = redis.call('GET', KEYS[1])
if not old or not old:find(ENDED) or old:sub(3, 9) ~= ARGV[1] then return 'lost' end
local flags = old:byte(2)
if bit.band(flags, 16) == 0 then
  -- ZREM comes first, so that a server without memory left takes the mark.
  redis.call('ZREM', KEYS[2], KEYS[1])
  redis.call('SET', KEYS[1], old:sub(1, 1) .. string.char(flags + 16) .. old:sub(3), 'KEEPTTL')
end
return 'marked'
