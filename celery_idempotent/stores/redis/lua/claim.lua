-- Take the key if nobody holds it. Put after live.lua and refusals.lua.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 token (of the bucket) · 5 interrupted
-- ARGV     1 attempt id, 8 bytes · 2 lease, ms · 3 life of the record, ms
--          4 fingerprint, 16 bytes or '' · 5 owner and message, packed · 6 flags of on_stale
--          7 attempts without an answer, one after the other
-- returns  {'claimed', record}
--          {'held', record, ms until its lease runs out}
--          {'settled', record, ms since it was settled}
--          {'mismatched', record}
--          {'unreadable'}: written by a newer version
--
-- A record is laid out as packed.py says. Who is held or mismatched is noted in it.
local attempt, lease, fingerprint = ARGV[1], tonumber(ARGV[2]), ARGV[4]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local token, created, crashes, attempts, extension = micros, now, 0, 1, ''
local reserved = 0

local old = redis.call('GET', KEYS[1])
if old then
  local state = old:sub(1, 1)
  local live = state == 'P' or state == 'I' or state == 'Q'
  local flags = old:byte(2)
  -- 142 are the flags that no live record has, 63 all that a settled one may have.
  if live and bit.band(flags, 142) ~= 0
    or not live and (state ~= 'C' and state ~= 'F' or flags > 63) then
    return {'unreadable'}
  end
  local at = live and 38 or 24
  if flags % 2 == 1 then
    local known = old:sub(at, at + 15)
    if fingerprint == '' then
      fingerprint = known
    elseif fingerprint ~= known then
      refuse(KEYS[1], old, 'm', now, ARGV[5]:sub(3, 2 + struct.unpack('>I2', ARGV[5])))
      return {'mismatched', old}
    end
    at = at + 16
  end
  if not live then
    return {'settled', old, now - struct.unpack('>I6', old, 16)}
  end

  crashes, attempts = old:byte(22, 23)
  if state == 'P' then
    if old:sub(30, 37) == attempt then
      -- The answer to this very claim was lost: give it again, with a new lease.
      local again = old:sub(1, 23) .. struct.pack('>I6', now + lease) .. old:sub(30)
      redis.call('SET', KEYS[1], again, 'PX', ARGV[3])
      redis.call('ZADD', KEYS[2], now + lease, KEYS[1])
      return {'claimed', again}
    end
    local begun = true
    for at = 1, #ARGV[7], 8 do
      begun = begun and old:sub(30, 37) ~= ARGV[7]:sub(at, at + 7)
    end
    local left = struct.unpack('>I6', old, 24) - now
    if begun and left > 0 then
      refuse(KEYS[1], old, 'c', now, ARGV[5]:sub(3, 2 + struct.unpack('>I2', ARGV[5])))
      return {'held', old, left}
    end
    if begun then crashes = math.min(crashes + 1, 255) end
  end
  attempts = math.min(attempts + 1, 255)
  created = struct.unpack('>I6', old, 10)
  token = math.max(token, struct.unpack('>I7', old, 3) + 1)
  at = at + 2 + struct.unpack('>I2', old, at)
  at = at + 2 + struct.unpack('>I2', old, at)
  if old:byte(at) == 77 then
    -- 'M': the new claim brings a message of its own, or none.
    at = at + 5 + struct.unpack('>I4', old, at + 1)
  end
  extension = old:sub(at)
  reserved = bit.band(flags, 16)
end

local highest = redis.call('GET', KEYS[4])
if highest then
  token = math.max(token, struct.unpack('>I7', highest) + 1)
end
local flags = (fingerprint == '' and 0 or 1) + reserved + ARGV[6]
local new = struct.pack('>c1BI7I6I6BBI6',
  'P', flags, token, created, now, crashes, attempts, now + lease)
  .. attempt .. fingerprint .. ARGV[5] .. extension
-- A SET comes first: a server without memory left judges a script by its first write, and shall
-- take no new work.
redis.call('SET', KEYS[4], new:sub(3, 9))
redis.call('SET', KEYS[1], new, 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now + lease, KEYS[1])
if not old then redis.call('ZREM', KEYS[3], KEYS[1]) end
if old and old:sub(1, 1) == 'I' then redis.call('ZREM', KEYS[5], KEYS[1]) end
return {'claimed', new}
