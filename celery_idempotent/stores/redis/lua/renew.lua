-- Let the lease of the claim that runs start anew.
--
-- KEYS     1 record · 2 leases
-- ARGV     1 'P', version and token that the record must begin with · 2 lease, ms · 3 life of the record, ms
-- returns  'renewed' | {record or nil, ms it has left, seconds, microseconds}: nothing was written
local time = redis.call('TIME')
local head = redis.call('GETRANGE', KEYS[1], '0', '29')
if head:sub(1, 10) ~= ARGV[1] then
  return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), time[1], time[2]}
end
local deadline = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
-- PEXPIRE comes first, so that a server without memory left lets nobody lose a lease.
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local created, _, updated = struct.unpack('>I8I4I8', head, 11)
redis.call('SETRANGE', KEYS[1], '30', struct.pack('>i8', deadline - (updated == 0 and created or updated)))
redis.call('ZADD', KEYS[2], string.format('%d', deadline), KEYS[1])
return 'renewed'
