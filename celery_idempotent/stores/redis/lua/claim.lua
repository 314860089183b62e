-- Claim or reserve a key that has no record; otherwise say what is there. Without arguments it only looks.
--
-- KEYS     1 record · 2 leases; in there '!' has the largest token of the bucket
-- ARGV     1 until the deadline, ms · 2 life of the record, ms · 3 state and version · 4 the record from its crashes on
-- returns  token and time in ms, 8 bytes each: it is yours
--          {record or nil, ms it has left if that was asked for, seconds, microseconds}: nothing was written
local time = redis.call('TIME')
if not ARGV[1] then return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), time[1], time[2]} end
local token = time[1] * 1000000 + time[2]
local now = math.floor(token / 1000)
local stamp = struct.pack('>I8I8', token, now)
local set = redis.pcall('SET', KEYS[1], ARGV[3] .. stamp .. ARGV[4], 'NX', 'PX', ARGV[2])
if not set or set.err then
  -- A server without memory left takes no new record, and answers for those that it has.
  local found = redis.call('GET', KEYS[1])
  return not found and set or {found, 0, time[1], time[2]}
end
local deadline = string.format('%d', now + ARGV[1])
local changed = redis.pcall('ZADD', KEYS[2], 'GT', 'CH', deadline, KEYS[1], string.format('%d', token), '!')
if changed == 2 then return stamp end
if changed ~= 1 and changed ~= 0 then
  -- A right is missing: then there is no record either.
  redis.call('DEL', KEYS[1])
  return changed
end
-- The clock was set back, two claims came in one microsecond, or a lost record left its entry: GT may have kept either.
token = redis.call('ZRANGEBYSCORE', KEYS[2], '1e14', '+inf', 'WITHSCORES')[2] + 1
redis.call('ZADD', KEYS[2], deadline, KEYS[1], string.format('%d', token), '!')
stamp = struct.pack('>I8I8', token, now)
redis.call('SET', KEYS[1], ARGV[3] .. stamp .. ARGV[4], 'PX', ARGV[2])
return stamp
