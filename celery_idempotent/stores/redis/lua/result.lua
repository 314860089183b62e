-- Store a task's result as Celery's backend would: 'stored' if it is there now. Nothing in here may fail, for what comes
-- before it in a script is written.
local function store_result(key, result, expiry)
  local known = redis.pcall('GET', key)
  if type(known) == 'table' then return nil end
  if known == result then return 'stored' end
  if known then
    -- Celery leaves a SUCCESS as it is, and writes over any other state. Only the backend can read what is not JSON.
    local state = known:match('^{"status": "([^"\\]+)"')
    if state == 'SUCCESS' then return 'stored' end
    if not state then return nil end
  end
  local set = expiry == '' and redis.pcall('SET', key, result) or redis.pcall('SETEX', key, expiry, result)
  if not set.ok then return nil end
  if type(redis.pcall('PUBLISH', key, result)) == 'table' then
    -- The backend would find this success, and publish nothing.
    redis.pcall('DEL', key)
    return nil
  end
  return 'stored'
end

