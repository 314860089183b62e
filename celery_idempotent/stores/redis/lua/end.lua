-- End the claim that runs: settle it, with the task's result if there is a key for that, or release it.
--
-- KEYS     1 record · 2 leases · [3 index of failed records, for FAILED] · [the last: where the task's result goes]
-- ARGV     1 'P', version and token that the record must begin with
--          and to settle
--          2 new state and version · 3 life of the record, ms · 4 the record from its flags on
--          5 the result · 6 its life in seconds, 0 for ever
-- returns  'released' | 'settled' | 'stored': settled, and the result is there
--          {record or nil, ms it has left, seconds, microseconds}: nothing was written
local head = redis.call('GETRANGE', KEYS[1], '0', '38')
local time = redis.call('TIME')
if head:sub(1, 10) ~= ARGV[1] or not ARGV[2] and head:byte(39) % 2 == 1 then
  return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), time[1], time[2]}
end
if not ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], KEYS[1])
  return 'released'
end
-- ZREM comes first, so that a server without memory left accepts the result of what it let in.
redis.call('ZREM', KEYS[2], KEYS[1])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local failed = ARGV[2]:byte() == 70
if failed then redis.call('ZADD', KEYS[3], string.format('%d', now + ARGV[3]), KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2] .. head:sub(3, 22) .. struct.pack('>I8I8', now, 0) .. ARGV[4], 'PX', ARGV[3])
local key, result, expiry = KEYS[failed and 4 or 3], ARGV[5], ARGV[6]
if not key then return 'settled' end
--include result_part.lua
