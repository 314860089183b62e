-- Make an INTERRUPTED or stale PROCESSING record that has a message QUEUED, with a new token, as an operator says.
--
-- KEYS     1 record · 2 leases · 3 interrupted · 4 token (of the bucket)
-- ARGV     1 until the deadline, ms · 2 attempt id, 8 bytes
--          3 token that it must have, 7 bytes, and then need not be stale, or '' for any · 4 the note, an item
-- returns  {'requeued', record} | {'none'} | {'unreadable'}: written by a newer version
--include live.lua
--include token.lua
local old = redis.call('GET', KEYS[1])
if not old then return {'none'} end
local state = old:sub(1, 1)
if old:find(ENDED) then return {'none'} end
if not old:find(LIVE) or foreign(old) then return {'unreadable'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if state == 'Q' then
  -- Maybe the answer to this very requeue was lost.
  return old:sub(30, 37) == ARGV[2] and {'requeued', old} or {'none'}
end
if ARGV[3] ~= '' and old:sub(3, 9) ~= ARGV[3] then return {'none'} end
if state == 'P' and ARGV[3] == '' and struct.unpack('>I6', old, 24) > now then return {'none'} end
local at = extension(old)
if old:sub(at, at) ~= 'M' then return {'none'} end
local ours = swept(old, false):sub(1, 2) .. larger_token(KEYS[4], old, time) .. old:sub(10)
return {'requeued', requeue(KEYS[2], KEYS[3], KEYS[1], noted(ours, ARGV[4]), now, tonumber(ARGV[1]), false, ARGV[2])}
