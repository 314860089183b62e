-- What claim.lua and reserve.lua share, before they look at what is stored.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 token (of the bucket) · 5 interrupted
-- ARGV     2 until the deadline, ms · 3 life of the record, ms
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local deadline = now + ARGV[2]

-- Store a claim or a reservation that leaves the index it was in, if any; return the record.
--
-- The record comes last: a user who lacks a right to an index leaves no claim without one.
local function put(record, index)
  -- Redis would write a number with 17 digits, which takes it as long as another command.
  redis.call('ZADD', KEYS[2], string.format('%d', deadline), KEYS[1])
  if index then redis.call('ZREM', index, KEYS[1]) end
  redis.call('SET', KEYS[1], record, 'PX', ARGV[3])
  return record
end

-- Store a new one, with a larger token than any before in the bucket. Its `rest` begins with the attempt id.
local function take(old, state, flags, created, crashes, attempts, rest)
  local token = micros
  if old then token = math.max(token, struct.unpack('>I7', old, 3) + 1) end
  -- A SET comes first: a server without memory left judges a script by its first write, and shall
  -- take no new work.
  local highest = redis.call('SET', KEYS[4], struct.pack('>I7', token), 'GET')
  if highest and struct.unpack('>I7', highest) >= token then
    -- The clock was set back, or two claims came in one microsecond.
    token = struct.unpack('>I7', highest) + 1
    redis.call('SET', KEYS[4], struct.pack('>I7', token))
  end
  local index = not old and KEYS[3] or old and old:sub(1, 1) == 'I' and KEYS[5]
  local head = struct.pack('>c1BI7I6I6BBI6', state, flags, token, created, now, crashes, attempts, deadline)
  return put(head .. rest, index)
end

