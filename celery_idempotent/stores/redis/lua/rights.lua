-- Name the commands, of those that a worker needs, that this user may not run on keys of ours.
--
-- KEYS     1 any key of ours
-- returns  their names; none before Redis 7, which cannot be asked
local missing = {}
if not redis.acl_check_cmd then return missing end
for _, command in ipairs({
  {'DEL', KEYS[1]}, {'EXPIRE', KEYS[1], '1'}, {'GET', KEYS[1]}, {'HINCRBY', KEYS[1], 'f', '1'},
  {'PTTL', KEYS[1]}, {'SET', KEYS[1], 'v'}, {'TIME'}, {'ZADD', KEYS[1], '1', 'm'},
  {'ZRANGEBYSCORE', KEYS[1], '0', '1'}, {'ZREM', KEYS[1], 'm'},
}) do
  if not redis.acl_check_cmd(unpack(command)) then missing[#missing + 1] = command[1] end
end
return missing
