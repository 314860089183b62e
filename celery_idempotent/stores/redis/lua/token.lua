-- Return a larger token than any before in the bucket, packed: an operator's change refuses whoever still runs.
local function larger_token(key, old, time)
  local token = math.max(time[1] * 1000000 + time[2], struct.unpack('>I7', old, 3) + 1)
  local highest = redis.call('GET', key)
  if highest then token = math.max(token, struct.unpack('>I7', highest) + 1) end
  local packed = struct.pack('>I7', token)
  redis.call('SET', key, packed)
  return packed
end
