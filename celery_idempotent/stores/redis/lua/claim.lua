-- Take the key if nobody holds it. Put after take.lua.
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
local attempt, fingerprint = ARGV[1], ARGV[4]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local deadline, who = now + ARGV[2], nil
local created, crashes, attempts, extra, reserved, at = now, 0, 1, '', 0, nil

local old = redis.call('GET', KEYS[1])
if old then
  if unreadable(old) then return {'unreadable'} end
  who = ARGV[5]:sub(3, 2 + struct.unpack('>I2', ARGV[5]))
  fingerprint, at = agreed(old, fingerprint)
  if not fingerprint then
    refuse(KEYS[1], old, 'm', now, who)
    return {'mismatched', old}
  end
  if old:find(ENDED) then return {'settled', old, now - struct.unpack('>I6', old, 16)} end

  crashes, attempts = old:byte(22, 23)
  if old:sub(1, 1) == 'P' then
    if old:sub(30, 37) == attempt then
      -- The answer to this very claim was lost: give it again, with a new lease.
      return {'claimed', again(old:sub(1, 23) .. struct.pack('>I6', deadline) .. old:sub(30), deadline)}
    end
    local begun = true
    for at = 1, #ARGV[7], 8 do
      begun = begun and old:sub(30, 37) ~= ARGV[7]:sub(at, at + 7)
    end
    local left = struct.unpack('>I6', old, 24) - now
    if begun and left > 0 then
      refuse(KEYS[1], old, 'c', now, who)
      return {'held', old, left}
    end
    if begun then crashes = math.min(crashes + 1, 255) end
  end
  attempts = math.min(attempts + 1, 255)
  created = struct.unpack('>I6', old, 10)
  at = extension(old)
  -- 'M': the new claim brings a message of its own, or none.
  if old:sub(at, at) == 'M' then at = past(old, at) end
  extra = old:sub(at)
  reserved = bit.band(old:byte(2), 16)
end

local flags = (fingerprint == '' and 0 or 1) + reserved + ARGV[6]
local rest = fingerprint .. ARGV[5] .. extra
return {'claimed', take(old, 'P', flags, micros, created, crashes, attempts, deadline, rest)}
