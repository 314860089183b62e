-- Store what the table decided, unless somebody wrote since the look.
--
-- KEYS     1 record · 2 leases · 3 failed · 4 interrupted
-- ARGV     1 head that was seen, '' for no record · 2 new record, '' to delete it
--          3 its life in ms, '' for as long as before · 4 its token if that is a new one, else ''
--          5 which of KEYS indexes it, or '' · 6 its score there · 7 which of KEYS indexes it no more, or ''
-- returns  1 | 0: somebody wrote since the look | the largest token of the bucket, as text: the new one is no larger
--
-- Each write has an id of its own in its head: who asks again, because the answer was lost, finds its own head.
local head = redis.call('GETRANGE', KEYS[1], '0', '82')
if head ~= ARGV[1] then return head == ARGV[2]:sub(1, 83) and 1 or 0 end
if ARGV[4] == '' then
  -- Removes nothing, but needs no memory: a full server takes what ends or goes on, and no new work.
  redis.call('ZREM', KEYS[2], '')
elseif redis.call('ZADD', KEYS[2], 'GT', 'CH', ARGV[4], '!') == 0 then
  -- This key may have had that larger token, and been given back.
  return redis.call('ZRANGEBYSCORE', KEYS[2], '1e14', '+inf', 'WITHSCORES')[2]
end
-- The record comes after its index: one without an entry would not be swept.
if ARGV[5] ~= '' then redis.call('ZADD', KEYS[tonumber(ARGV[5])], ARGV[6], KEYS[1]) end
if ARGV[2] == '' then redis.call('DEL', KEYS[1])
elseif ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
if ARGV[7] ~= '' then redis.call('ZREM', KEYS[tonumber(ARGV[7])], KEYS[1]) end
return 1
