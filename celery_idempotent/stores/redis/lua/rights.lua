-- Name the commands, of those that a worker needs, that this user may not run on keys of ours.
--
-- KEYS     1 any key of ours
-- returns  their names; none before Redis 7, which cannot be asked
local missing = {}
for _, words in ipairs(redis.acl_check_cmd and {
  {'DEL'}, {'EXPIRE', '1'}, {'GET'}, {'GETRANGE', '0', '1'}, {'HINCRBY', 'f', '1'}, {'PEXPIRE', '1'}, {'PTTL'},
  {'SET', 'v'}, {'SETRANGE', '0', 'v'}, {'ZADD', '1', 'm'}, {'ZRANDMEMBER', '1'},
  {'ZRANGEBYSCORE', '0', '1'}, {'ZREM', 'm'},
} or {}) do
  if not redis.acl_check_cmd(words[1], KEYS[1], unpack(words, 2)) then missing[#missing + 1] = words[1] end
end
if redis.acl_check_cmd and not redis.acl_check_cmd('TIME') then missing[#missing + 1] = 'TIME' end
return missing
