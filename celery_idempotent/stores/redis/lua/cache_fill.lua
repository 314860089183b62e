-- Keep a settled record as it was read from the truth after the ticket was given.
--
-- KEYS     1 entry · 2 generation (of the bucket)
-- ARGV     1-3 the ticket: generation, its time in ms, history
--          4 for how long the truth keeps the record, ms · 5 for how long it has been settled, ms
--          6 the record, packed
-- returns  'filled'
--          'refused': something in the bucket was forgotten since, or Redis lost data since
--          'newer': the entry is · 'expired'
local info = redis.call('INFO', 'replication')
local history = info:match('master_replid:(%x+)'):sub(1, 16)
if history ~= ARGV[3] or redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'refused' end
local old, new = redis.call('GET', KEYS[1]), ARGV[6]
if old then
  if old:sub(1, 1) == 'T' then return 'refused' end
  if old:sub(1, 17) == 'S' .. history then
    -- Tokens as they stand in records, 8 bytes.
    if old:sub(26, 33) > new:sub(3, 10) then return 'newer' end
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Counted from the ticket, which is older than the reading: the entry ends no later than the record itself, however
-- late this arrives.
local left = ARGV[2] + ARGV[4] - now
if left <= 0 then return 'expired' end
-- The age is counted from now: rather too young than too old by as long as the reading took.
local settled = math.max(now - ARGV[5], 0)
redis.call('SET', KEYS[1], 'S' .. history .. struct.pack('>I6', settled) .. new, 'PX', string.format('%d', left))
return 'filled'
