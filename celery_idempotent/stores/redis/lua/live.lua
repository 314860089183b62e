-- What the scripts about live records (P, I, Q) share. packed.py has the layout.

-- Return where the extension of a live record starts.
local function extension(record)
  local at = record:byte(2) % 2 == 1 and 54 or 38
  at = at + 2 + struct.unpack('>I2', record, at)
  return at + 2 + struct.unpack('>I2', record, at)
end

-- Return where the item after the one at this position starts.
local function past(record, at)
  return at + 5 + struct.unpack('>I4', record, at + 1)
end

-- Has a live record a flag that this version does not know?
local function foreign(record)
  return bit.band(record:byte(2), 136) ~= 0
end

-- Return a live record as one that a sweep took from its owner, or as one that none did.
local function swept(record, yes)
  return record:sub(1, 1) .. string.char(bit.band(record:byte(2), 251) + (yes and 4 or 0)) .. record:sub(3)
end

-- Return a live record with the note of an operator, an item, in the place of the last one.
local function noted(record, item)
  local at = extension(record)
  while at <= #record do
    local rest = past(record, at)
    if record:sub(at, at) == 'X' then return record:sub(1, at - 1) .. record:sub(rest) .. item end
    at = rest
  end
  return record .. item
end

-- Make a live record INTERRUPTED, with this many crashes, for as long as it would have lived, and index it.
local function interrupt(leases, interrupted, name, old, now, crashes)
  local new = 'I' .. old:sub(2, 15) .. struct.pack('>I6B', now, crashes) .. old:sub(23)
  local left = math.max(redis.call('PTTL', name), 0)
  -- ZREM comes first, so that a server without memory left lets a crash be noted.
  redis.call('ZREM', leases, name)
  redis.call('SET', name, new, 'KEEPTTL')
  redis.call('ZADD', interrupted, now + left, name)
  return new
end

-- Make a live record QUEUED for its message to be published, and count that; nil if it has none.
--
-- A crash counts where a lease ran out. The record lives as much longer as its deadline is away,
-- and with `doubling` that is twice as far each time, up to 1,024 times.
local function requeue(leases, interrupted, name, old, now, delay, doubling, attempt)
  local count = extension(old)
  if old:sub(count, count) ~= 'M' then return nil end
  count = past(old, count)
  local rest, requeues = count, 0
  if old:sub(count, count) == 'R' then
    rest, requeues = past(old, count), old:byte(count + 5)
  end
  if doubling then delay = delay * 2 ^ math.min(requeues, 10) end

  local state, updated, crashes = old:sub(1, 1), old:sub(16, 21), old:byte(22)
  if state == 'P' then crashes = math.min(crashes + 1, 255) end
  if state ~= 'Q' then updated = struct.pack('>I6', now) end
  local new = 'Q' .. old:sub(2, 15) .. updated
    .. struct.pack('>BBI6', crashes, old:byte(23), now + delay)
    .. attempt .. old:sub(38, count - 1)
    .. struct.pack('>c1I4B', 'R', 1, math.min(requeues + 1, 255)) .. old:sub(rest)
  local left = math.max(redis.call('PTTL', name), 0)
  -- ZREM comes first, so that a server without memory left lets a sweep do its work.
  redis.call('ZREM', leases, name)
  if state == 'I' then redis.call('ZREM', interrupted, name) end
  redis.call('SET', name, new, 'PX', left + delay)
  redis.call('ZADD', leases, now + delay, name)
  return new
end

