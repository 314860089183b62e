-- Write the end state, unless the key has another token by now, and the task's result with it if there is a fifth key.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 interrupted · 5 where a Redis result backend has the result, if any;
--          for an operator the token (of the bucket)
-- ARGV     1 the record as settled, with the claim's times and counts · 2 how long to keep it, ms
--          3 the result, encoded, if there is a fifth key · 4 how long to keep it, s, or '' for ever
-- and, where one of them is not '':
--          5 letter of the state that it must be in, unless it has ended; '' for any, also where the record is gone.
--            With 'F' one that failed ends anew · 6 '1' for an operator: the record gets a new token
-- returns  'settled' (now, or before with this token: then the first value stays)
--          'stored': settled, and the result is there
--          'lost' | 'none' (it is gone) | 'unreadable'

--include result.lua
local new, wanted, operator = ARGV[1], ARGV[5] or '', ARGV[6] == '1'
local result = not operator and KEYS[5]
local old = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = old and old:sub(1, 1)
if old then
  local ended = old:find(ENDED)
  if not ended and not old:find(LIVE) then return 'unreadable' end
  if old:sub(3, 9) ~= new:sub(3, 9) then return 'lost' end
  -- Also one that a sweep failed, for its owner.
  local anew = state == 'F' and (wanted == 'F' or wanted == '' and bit.band(old:byte(2), 64) ~= 0)
  if ended and not anew then
    return result and store_result(result, ARGV[3], ARGV[4]) or 'settled'
  end
  if wanted ~= '' and state ~= wanted then return 'lost' end
  local token = old:sub(3, 9)
  if operator then
    --include token.lua
    token = larger_token(KEYS[5], old, time)
  end
  -- A sweep may have counted a crash since the claim.
  new = new:sub(1, 2) .. token .. old:sub(10, 15) .. struct.pack('>I6', now) .. old:sub(22, 23) .. new:sub(24)
  if anew then redis.call('ZREM', KEYS[3], KEYS[1]) end
elseif wanted ~= '' then
  return 'none'
else
  -- Flushed or evicted, maybe with the index.
  new = new:sub(1, 15) .. struct.pack('>I6', now) .. new:sub(22)
  redis.call('ZREM', KEYS[3], KEYS[1])
end
-- ZREM comes first, so that a server without memory left accepts the result of what it let in.
redis.call('ZREM', KEYS[2], KEYS[1])
if state == 'I' then redis.call('ZREM', KEYS[4], KEYS[1]) end
redis.call('SET', KEYS[1], new, 'PX', ARGV[2])
if new:sub(1, 1) == 'F' then
  redis.call('ZADD', KEYS[3], now + ARGV[2], KEYS[1])
end
return result and store_result(result, ARGV[3], ARGV[4]) or 'settled'
