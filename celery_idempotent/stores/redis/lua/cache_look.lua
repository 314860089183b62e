-- Answer for a settled key, or give a ticket for a later fill.
--
-- KEYS     1 entry · 2 generation (of the bucket)
-- ARGV     1 a generation, 8 random bytes, for a bucket that has none · 2 '1' for a ticket in any case, else ''
-- returns  {'hit', record, ms since it was settled}
--          {'miss', generation, now in ms, history}: the ticket
--          {'buried'}: the key is being forgotten, so nobody may fill
--
-- Entries are laid out as cache.py says. An entry is believed only by the master on which it was written, and only as
-- long as that server has not been restarted, demoted or replaced: each time Redis starts a new history (its
-- replication id). What an older copy of the data brings back is of another history, and counts as absent.
local info = redis.call('INFO', 'replication')
if not info:find('role:master', 1, true) then
  return redis.error_reply('READONLY a replica does not answer for the cache')
end
local history = info:match('master_replid:(%x+)'):sub(1, 16)
local entry = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if entry then
  if entry:sub(1, 1) == 'T' then return {'buried'} end
  if ARGV[2] == '' and entry:sub(1, 17) == 'S' .. history then
    return {'hit', entry:sub(24), math.max(now - struct.unpack('>I6', entry, 18), 0)}
  end
end
local generation = redis.call('GET', KEYS[2])
if not generation then
  -- Never so far, or flushed: a ticket issued before the flush must no longer fit.
  generation = ARGV[1]
  redis.call('SET', KEYS[2], generation)
end
return {'miss', generation, now, history}
