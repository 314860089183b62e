-- End those of these records whose lease or deadline ran out, and mend the index for the others.
-- Put after live.lua.
--
-- KEYS     1 leases · 2 interrupted · 3... records that the index of leases calls due
-- ARGV     1 until the deadline of what is requeued, ms · 2 attempt id, 8 bytes
-- returns  for each record: as it is now, INTERRUPTED or QUEUED, or nil if there was nothing to do
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local swept = {}
for i = 3, #KEYS do
  local name, new = KEYS[i], nil
  local old = redis.call('GET', name)
  local state = old and old:sub(1, 1)
  if (state == 'P' or state == 'Q') and not foreign(old) then
    local deadline = struct.unpack('>I6', old, 24)
    if deadline > now then
      -- Renewed, claimed or requeued again since the index was read.
      redis.call('ZADD', KEYS[1], deadline, name)
      -- Requeued by this very sweep, whose answer was lost.
      if state == 'Q' and old:sub(30, 37) == ARGV[2] then new = old end
    else
      if state == 'Q' or bit.band(old:byte(2), 64) ~= 0 then
        new = requeue(KEYS[1], KEYS[2], name, old, now, tonumber(ARGV[1]), true, ARGV[2])
      end
      if not new then
        redis.call('ZREM', KEYS[1], name)
        -- A reservation without a message is left to the next one.
        if state == 'P' then
          new = interrupt(KEYS[1], KEYS[2], name, old, now, math.min(old:byte(22) + 1, 255))
        end
      end
    end
  elseif not old or state == 'I' or old:find(ENDED) then
    -- Expired or evicted, swept or settled by somebody else. What a newer version wrote is left
    -- to that version.
    redis.call('ZREM', KEYS[1], name)
  end
  swept[i - 2] = new or false
end
return swept
