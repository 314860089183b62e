-- End those of these records whose lease or deadline ran out, and mend the index for the others.
--
-- KEYS     for each bucket: leases, interrupted, and records that the index of leases calls due
-- ARGV     1 until the deadline of what is requeued, ms · 2 attempt id, 8 bytes · 3... how many records of each bucket
-- returns  for each record: as it is now, INTERRUPTED or QUEUED, or nil if there was nothing to do
--include live.lua
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local delay, attempt = tonumber(ARGV[1]), ARGV[2]

local function sweep(leases, interrupted, name)
  local old, new = redis.call('GET', name), nil
  local state = old and old:sub(1, 1)
  if (state == 'P' or state == 'Q') and not foreign(old) then
    local deadline = struct.unpack('>I6', old, 24)
    if deadline > now then
      -- Renewed, claimed or requeued again since the index was read.
      redis.call('ZADD', leases, deadline, name)
      -- Requeued by this very sweep, whose answer was lost.
      if state == 'Q' and old:sub(30, 37) == attempt then new = old end
    else
      if state == 'P' then old = swept(old, true) end
      if state == 'Q' or bit.band(old:byte(2), 64) ~= 0 then
        new = requeue(leases, interrupted, name, old, now, delay, true, attempt)
      end
      if not new and state == 'P' then
        new = interrupt(leases, interrupted, name, old, now, math.min(old:byte(22) + 1, 255))
      elseif not new then
        -- A reservation without a message is left to the next one.
        redis.call('ZREM', leases, name)
      end
    end
  elseif not old or state == 'I' or old:find(ENDED) then
    -- Expired or evicted, swept or settled by somebody else. What a newer version wrote is left
    -- to that version.
    redis.call('ZREM', leases, name)
  end
  return new or false
end

local swept, at = {}, 0
for bucket = 3, #ARGV do
  local leases, interrupted = KEYS[at + 1], KEYS[at + 2]
  at = at + 2
  for _ = 1, ARGV[bucket] do
    at = at + 1
    swept[#swept + 1] = sweep(leases, interrupted, KEYS[at])
  end
end
return swept
