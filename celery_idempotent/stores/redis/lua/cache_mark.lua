-- Note that the callbacks of the record with this token were sent.
--
-- KEYS     1 entry
-- ARGV     1 token, 7 bytes
-- returns  'marked' (now or before) | 'none'
local old = redis.call('GET', KEYS[1])
if not old or old:sub(1, 1) ~= 'S' or old:sub(26, 32) ~= ARGV[1] then return 'none' end
local flags = old:byte(25)
if bit.band(flags, 16) == 0 then
  redis.call('SET', KEYS[1], old:sub(1, 24) .. string.char(flags + 16) .. old:sub(26), 'KEEPTTL')
end
return 'marked'
