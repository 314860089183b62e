-- What claim.lua and reserve.lua share: put before them, after live.lua and notes.lua.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 token (of the bucket) · 5 interrupted
-- ARGV     1 attempt id, 8 bytes · 3 life of the record, ms

-- Was the record written by a newer version?
local function unreadable(old)
  if old:find(LIVE) then return foreign(old) end
  return not old:find(ENDED) or old:byte(2) > 63
end

-- Return the fingerprint that the key has from now on, and where the record goes on after its own; nil if they differ.
local function agreed(old, fingerprint)
  local at = old:find(LIVE) and 38 or 24
  if old:byte(2) % 2 == 0 then return fingerprint, at end
  local known = old:sub(at, at + 15)
  if fingerprint ~= '' and fingerprint ~= known then return nil end
  return known, at + 16
end

-- Store a claim or a reservation that was there before, with a new deadline; return the record.
local function again(record, deadline)
  redis.call('SET', KEYS[1], record, 'PX', ARGV[3])
  redis.call('ZADD', KEYS[2], deadline, KEYS[1])
  return record
end

-- Store a new one, with a larger token than any before in the bucket; return the record.
local function take(old, state, flags, micros, created, crashes, attempts, deadline, rest)
  local token, now = micros, math.floor(micros / 1000)
  if old then token = math.max(token, struct.unpack('>I7', old, 3) + 1) end
  local highest = redis.call('GET', KEYS[4])
  if highest then token = math.max(token, struct.unpack('>I7', highest) + 1) end
  local new = struct.pack('>c1BI7I6I6BBI6', state, flags, token, created, now, crashes, attempts, deadline)
    .. ARGV[1] .. rest
  -- A SET comes first: a server without memory left judges a script by its first write, and shall
  -- take no new work.
  redis.call('SET', KEYS[4], new:sub(3, 9))
  again(new, deadline)
  if not old then redis.call('ZREM', KEYS[3], KEYS[1]) end
  if old and old:sub(1, 1) == 'I' then redis.call('ZREM', KEYS[5], KEYS[1]) end
  return new
end

