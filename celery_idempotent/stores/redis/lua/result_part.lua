-- Store and publish a task's result as Celery's backend would: it leaves a SUCCESS as it is, and replaces any other
-- state. Nothing in here may fail, for a record may be written.
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
