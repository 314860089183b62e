-- Take the key for a message that is about to be published.
--
-- KEYS     1 record · 2 leases · 3 failures · 4 token (of the bucket) · 5 interrupted
-- ARGV     1 who reserves, 8 bytes · 2 until the deadline, ms · 3 life of the record, ms
--          4 fingerprint, 16 bytes or '' · 5 task id, packed · 6 message, packed, or ''
--          7 flags: 16, and 2 while a transaction may be rolled back
-- returns  {'reserved', record}
--          {'held', record, ms until its lease or its deadline}
--          {'settled', record, ms since it was settled}
--          {'mismatched', record}
--          {'unreadable'}: written by a newer version
--include take.lua
local fingerprint, owner = ARGV[4], ARGV[5] .. '\0\0' .. ARGV[6]
local created, crashes, attempts, extra, flags, at = now, 0, 0, '', tonumber(ARGV[7]), nil

local old = redis.call('GET', KEYS[1])
if old then
  --include taken.lua
  if unreadable(old) then return {'unreadable'} end
  fingerprint, at = agreed(old, fingerprint)
  if not fingerprint then return {'mismatched', old} end
  if old:find(ENDED) then return {'settled', old, now - struct.unpack('>I6', old, 16)} end
  local state = old:sub(1, 1)
  if state == 'P' then
    return {'held', old, math.max(struct.unpack('>I6', old, 24) - now, 0)}
  end

  flags = bit.bor(bit.band(old:byte(2), 253), ARGV[7])
  if state == 'Q' then
    local own = old:sub(at, at + #ARGV[5] - 1) == ARGV[5]
    if own or old:sub(30, 37) == ARGV[1] then
      -- The answer to this very reservation was lost, or the first sender publishes again.
      local rest = old:sub(38)
      if own and ARGV[6] ~= '' then
        at = extension(old)
        rest = old:sub(38, at - 1) .. ARGV[6]
        if old:sub(at, at) == 'M' then at = past(old, at) end
        rest = rest .. old:sub(at)
      end
      local head = 'Q' .. string.char(flags) .. old:sub(3, 23) .. struct.pack('>I6', deadline)
      return {'reserved', put(head .. ARGV[1] .. rest)}
    end
    local left = struct.unpack('>I6', old, 24) - now
    if left > 0 then return {'held', old, left} end
    -- Its sender died before it published: the message goes out under the same task id.
    flags, owner, extra = bit.band(flags, 251), '', old:sub(at)
  else
    -- Its message was under another task id: there will be a new one.
    flags = bit.band(flags, 19)
    at = extension(old)
    if old:sub(at, at) == 'M' then at = past(old, at) end
    extra = old:sub(at)
  end
  crashes, attempts = old:byte(22, 23)
  created = struct.unpack('>I6', old, 10)
end

if fingerprint ~= '' then flags = bit.bor(flags, 1) end
local rest = ARGV[1] .. fingerprint .. owner .. extra
return {'reserved', take(old, 'Q', flags, created, crashes, attempts, rest)}
