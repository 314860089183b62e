-- Write the end state, unless the key has another token by now, and the task's result with it if there is a fifth key.
-- Put after live.lua and notes.lua.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 interrupted · 5 where a Redis result backend has the result, if any
-- ARGV     1 the record as settled, with the claim's times and counts · 2 how long to keep it, ms
--          3 '1' to write a settled record again, so that a WAIT waits for it, else ''
--          4 letter of the state that it must be in, unless it has ended; '' for any, also where the record is gone.
--            With 'F' one that failed ends anew · 5 what the operator did who says so, packed, or ''
--          6 the result, encoded · 7 how long to keep it, s, or '' for ever
-- returns  'settled' (now, or before with this token: then the first value stays)
--          'stored': settled, and the result is there
--          'lost' | 'none' (it is gone) | 'unreadable'
local function settle()
  local new = ARGV[1]
  local old = redis.call('GET', KEYS[1])
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if old then
    local state = old:sub(1, 1)
    if not old:find(LIVE) and not old:find(ENDED) then return 'unreadable' end
    if old:sub(3, 9) ~= new:sub(3, 9) then return 'lost' end
    local anew = state == 'F' and ARGV[4] == 'F'
    if old:find(ENDED) and not anew then
      if ARGV[3] == '1' then
        redis.call('ZREM', KEYS[2], KEYS[1])
        redis.call('SET', KEYS[1], old, 'KEEPTTL')
      end
      return 'settled'
    end
    if ARGV[4] ~= '' and state ~= ARGV[4] then return 'lost' end
    -- A sweep may have counted a crash since the claim.
    new = new:sub(1, 2) .. old:sub(3, 15) .. struct.pack('>I6', now) .. old:sub(22, 23) .. new:sub(24)
    local notes = intervened(notes_of(old), ARGV[5], now)
    if notes ~= '' then
      local _, head, tail = notes_of(new)
      new = with_notes(head, notes, tail)
    end
    if anew then redis.call('ZREM', KEYS[3], KEYS[1]) end
  elseif ARGV[4] ~= '' then
    return 'none'
  else
    -- Flushed or evicted, maybe with the index.
    new = new:sub(1, 15) .. struct.pack('>I6', now) .. new:sub(22)
    redis.call('ZREM', KEYS[3], KEYS[1])
  end
  -- ZREM comes first, so that a server without memory left accepts the result of what it let in.
  redis.call('ZREM', KEYS[2], KEYS[1])
  if old and old:sub(1, 1) == 'I' then redis.call('ZREM', KEYS[4], KEYS[1]) end
  redis.call('SET', KEYS[1], new, 'PX', ARGV[2])
  if new:sub(1, 1) == 'F' then
    redis.call('ZADD', KEYS[3], now + ARGV[2], KEYS[1])
  end
  return 'settled'
end

-- Is the result there now? Nothing in here may fail: the end state is written.
local function store(key, result, expiry)
  local known = redis.pcall('GET', key)
  if type(known) == 'table' then return false end
  if known == result then return true end
  if known then
    -- Celery leaves a SUCCESS as it is, and writes over any other state. Only the backend can read what is not JSON.
    local state = known:match('^{"status": "([^"\\]+)"')
    if state == 'SUCCESS' then return true end
    if not state then return false end
  end
  local told = redis.pcall('PUBLISH', key, result)
  if type(told) == 'table' then return false end
  local set = expiry == '' and redis.pcall('SET', key, result) or redis.pcall('SETEX', key, expiry, result)
  return set.ok ~= nil
end

local word = settle()
if word == 'settled' and KEYS[5] and store(KEYS[5], ARGV[6], ARGV[7]) then return 'stored' end
return word
