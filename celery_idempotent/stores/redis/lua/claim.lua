-- Take the key if nobody holds it.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 token (of the bucket) · 5 interrupted
-- ARGV     1 attempt id, 8 bytes · fingerprint, 16 bytes, if it has one · owner and message, packed
--          2 lease, ms · 3 life of the record, ms · 4 flags: 1 with a fingerprint, and those of on_stale
-- returns  {'new', token and now}: claimed, and there was no record
--          {'claimed', record}
--          {'held', record, ms until its lease runs out}
--          {'settled', record, ms since it was settled}
--          {'mismatched', record}
--          {'unreadable'}: written by a newer version
--
-- A record is laid out as packed.py says.
--include take.lua
local old = redis.call('GET', KEYS[1])
if not old then
  -- By far the most common. Defining the functions for the other cases takes longer than this.
  return {'new', take(nil, 'P', ARGV[4], now, 0, 1, ARGV[1]):sub(3, 15)}
end

--include taken.lua
if unreadable(old) then return {'unreadable'} end
local attempt, fingerprint, claimant = ARGV[1]:sub(1, 8), '', ARGV[1]:sub(9)
if ARGV[4] % 2 == 1 then fingerprint, claimant = claimant:sub(1, 16), claimant:sub(17) end
local at
fingerprint, at = agreed(old, fingerprint)
if not fingerprint then return {'mismatched', old} end
if old:find(ENDED) then return {'settled', old, now - struct.unpack('>I6', old, 16)} end

local crashes, attempts = old:byte(22, 23)
if old:sub(1, 1) == 'P' then
  if old:sub(30, 37) == attempt then
    -- The answer to this very claim was lost: give it again, with a new lease.
    return {'claimed', put(old:sub(1, 23) .. struct.pack('>I6', deadline) .. old:sub(30))}
  end
  local left = struct.unpack('>I6', old, 24) - now
  if left > 0 then return {'held', old, left} end
  crashes = math.min(crashes + 1, 255)
end
attempts = math.min(attempts + 1, 255)
local created = struct.unpack('>I6', old, 10)
at = extension(old)
-- 'M': the new claim brings a message of its own, or none.
if old:sub(at, at) == 'M' then at = past(old, at) end
local reserved = bit.band(old:byte(2), 16)
local flags = bit.bor(ARGV[4], reserved, fingerprint == '' and 0 or 1)
local rest = attempt .. fingerprint .. claimant .. old:sub(at)
return {'claimed', take(old, 'P', flags, created, crashes, attempts, rest)}
