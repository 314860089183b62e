-- End the claim that runs: settle it, with the task's result if there is one, or release it. Or store a result alone.
--
-- KEYS     1 record · 2 leases · [3 index of failed records, for FAILED] · [the last: where the task's result goes]
-- ARGV     1 'P', version and token that the record must begin with, '' for a result alone
--          and to settle
--          2 new state and version · 3 life of the record, ms · 4 the record from its last change on, 0 (its third byte) for now
--          5 the result · 6 its life in seconds, 0 for ever
-- returns  'released' | 'settled' | 'stored': settled, and the result is there
--          {record or nil, ms it has left, seconds, microseconds}: nothing was written
local key, result, expiry = KEYS[#KEYS], ARGV[5], ARGV[6]
if ARGV[1] ~= '' then
  local head = redis.call('GETRANGE', KEYS[1], '0', '38')
  if head:sub(1, 10) ~= ARGV[1] or not ARGV[2] and head:byte(39) % 2 == 1 then
    local time = redis.call('TIME')
    return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), time[1], time[2]}
  end
  if not ARGV[2] then
    redis.call('DEL', KEYS[1])
    redis.call('ZREM', KEYS[2], KEYS[1])
    return 'released'
  end
  -- ZREM comes first, so that a server without memory left accepts the result of what it let in.
  redis.call('ZREM', KEYS[2], KEYS[1])
  local rest = ARGV[4]
  if rest:byte(3) == 0 then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    if ARGV[2]:byte() == 70 then redis.call('ZADD', KEYS[3], string.format('%d', now), KEYS[1]) end
    rest = struct.pack('>I8', now) .. rest:sub(9)
  end
  redis.call('SET', KEYS[1], ARGV[2] .. head:sub(3, 22) .. rest, 'PX', ARGV[3])
  if not result then return 'settled' end
end
-- As Celery's backend would: it leaves a SUCCESS as it is, and replaces any other state. Nothing from here on may fail,
-- for a record may be written.
local first
if expiry == '0' then first = redis.pcall('SET', key, result, 'NX')
else first = redis.pcall('SET', key, result, 'NX', 'EX', expiry) end
if not first then
  local known = redis.pcall('GET', key)
  local state = type(known) == 'string' and known:match('^{"status": "([^"\\]+)"')
  if state == 'SUCCESS' or known == result then return 'stored' end
  if not state then return 'settled' end
  if expiry == '0' then first = redis.pcall('SET', key, result)
  else first = redis.pcall('SET', key, result, 'EX', expiry) end
end
if not first.ok then return 'settled' end
if type(redis.pcall('PUBLISH', key, result)) == 'table' then
  -- The backend would find this success, and publish nothing.
  redis.pcall('DEL', key)
  return 'settled'
end
return 'stored'
