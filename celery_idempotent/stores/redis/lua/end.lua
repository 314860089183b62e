-- End the claim that runs: settle it, with the task's result if there is one, or release it.
--
-- KEYS     1 record · 2 leases · [3 index of failed records, for FAILED] · [the last: where the task's result goes]
-- ARGV     1 to release: state, version and token that the record must begin with
--          to settle: the new record, which must begin as this one but for the state; its last change is 0 for now
--          2 life of the record, ms · 3 the result · 4 its life in seconds, 0 for ever
-- returns  'released' | 'settled' | 'stored': settled, and the result is there
--          {record or nil, ms it has left, seconds, microseconds}: nothing was written
local record, life = ARGV[1], ARGV[2]
local head = redis.call('GETRANGE', KEYS[1], '0', '38')
if head:byte() ~= 80 or head:sub(2, life and 20 or 10) ~= record:sub(2, 20) or not life and head:byte(39) % 2 == 1 then
  local time = redis.call('TIME')
  return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), time[1], time[2]}
end
if not life then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], KEYS[1])
  return 'released'
end
-- ZREM comes first, so that a server without memory left accepts the result of what it let in.
redis.call('ZREM', KEYS[2], KEYS[1])
if record:byte(25) == 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if record:byte() == 70 then redis.call('ZADD', KEYS[3], string.format('%d', now), KEYS[1]) end
  record = record:sub(1, 22) .. struct.pack('>I8', now) .. record:sub(31)
end
redis.call('SET', KEYS[1], record, 'PX', life)
local key, result, expiry = KEYS[#KEYS], ARGV[3], ARGV[4]
if not result then return 'settled' end
-- As Celery's backend would: it leaves a SUCCESS as it is, and replaces any other state. Nothing from here on may fail,
-- for the record is written.
local first
if expiry == '0' then first = redis.pcall('SET', key, result, 'NX')
else first = redis.pcall('SET', key, result, 'NX', 'EX', expiry) end
if not first then
  local known = redis.pcall('GET', key)
  local state = type(known) == 'string' and known:match('^{"status": "([^"\\]+)"')
  if state == 'SUCCESS' then return 'stored' end
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
