-- How a record notes who could not have its key. Put after live.lua; packed.py and refusals.py have the layout.

-- Return where the items of a live record say who was refused, and where that ends; nil if they do not.
local function refusals_of(record)
  local at = extension(record)
  while at <= #record do
    local rest = past(record, at)
    if record:sub(at, at) == 'X' then return at, rest end
    at = rest
  end
end

-- Return what is behind the task id of a settled record: its refusals, or else its value.
local function past_task_id(record)
  local flags = record:byte(2)
  local at = flags % 2 == 1 and 40 or 24
  if bit.band(flags, 2) ~= 0 then return at + 16 end
  return at + 2 + struct.unpack('>I2', record, at)
end

-- Return a settled record that has none with refusals.
local function settled_with(record, refusals)
  local at = past_task_id(record)
  return record:sub(1, 1) .. string.char(record:byte(2) + 32) .. record:sub(3, at - 1)
    .. struct.pack('>I2', #refusals) .. refusals .. record:sub(at)
end

-- Note in a record that somebody was refused: 'c' for a conflict, 'm' for a mismatch. Keeps five.
--
-- What the holder, a sweep or a settle goes by stays as it is. A record of more than 64 KiB takes no note: nobody shall
-- have it written again and again. Nor does a server that takes no writes at the moment, and it answers all the same.
local function refuse(name, record, kind, now, who)
  if #record > 65536 then return end
  local live = record:find(LIVE)
  local known, at, rest = '', nil, nil
  if live then
    at, rest = refusals_of(record)
    if at then known = record:sub(at + 5, rest - 1) end
  elseif bit.band(record:byte(2), 32) ~= 0 then
    at = past_task_id(record)
    rest = at + 2 + struct.unpack('>I2', record, at)
    known = record:sub(at + 2, rest - 1)
    record = record:sub(1, 1) .. string.char(record:byte(2) - 32) .. record:sub(3, at - 1) .. record:sub(rest)
  end

  who = who:sub(1, 100)
  if known:sub(1, 1) == kind and known:byte(8) == #who and known:sub(9, 8 + #who) == who then
    known = known:sub(9 + #who)
  end
  local last = 0
  for _ = 1, 4 do
    if last < #known then last = last + 8 + known:byte(last + 8) end
  end
  known = struct.pack('>c1I6B', kind, now, #who) .. who .. known:sub(1, last)

  if not live then
    record = settled_with(record, known)
  else
    at, rest = at or #record + 1, rest or #record + 1
    record = record:sub(1, at - 1) .. struct.pack('>c1I4', 'X', #known) .. known .. record:sub(rest)
  end
  redis.pcall('SET', name, record, 'KEEPTTL')
end

