-- Interrupt those of these records whose lease ran out, and mend the index for the others.
--
-- KEYS     1 leases · 2... records that the index calls due
-- returns  for each record: the interrupted one, or nil if there was nothing to interrupt
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local swept = {}
for i = 2, #KEYS do
  swept[i - 1] = false
  local old = redis.call('GET', KEYS[i])
  local state = old and old:sub(1, 1)
  if state == 'P' then
    local deadline = struct.unpack('>I6', old, 24)
    if deadline <= now then
      local crashes = math.min(old:byte(22) + 1, 255)
      local new = 'I' .. old:sub(2, 15) .. struct.pack('>I6B', now, crashes) .. old:sub(23)
      redis.call('ZREM', KEYS[1], KEYS[i])
      redis.call('SET', KEYS[i], new, 'KEEPTTL')
      swept[i - 1] = new
    else
      -- Renewed or claimed again since the index was read.
      redis.call('ZADD', KEYS[1], deadline, KEYS[i])
    end
  elseif not old or state == 'I' or state == 'C' or state == 'F' then
    -- Expired or evicted, swept or settled by somebody else. What a newer version wrote is left
    -- to that version.
    redis.call('ZREM', KEYS[1], KEYS[i])
  end
end
return swept
