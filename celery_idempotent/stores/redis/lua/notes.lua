-- What a record notes: who could not have its key, and what operators did to it. Needs live.lua. packed.py,
-- refusals.py and interventions.py have the layout.

-- Return the notes of a record, and what is before and behind them.
local function notes_of(record)
  local at, rest
  if record:find(LIVE) then
    at = extension(record)
    while at <= #record do
      rest = past(record, at)
      if record:sub(at, at) == 'X' then return record:sub(at + 5, rest - 1), record:sub(1, at - 1), record:sub(rest) end
      at = rest
    end
    return '', record, ''
  end
  -- Settled: behind the task id.
  local flags = record:byte(2)
  at = flags % 2 == 1 and 40 or 24
  at = bit.band(flags, 2) ~= 0 and at + 16 or at + 2 + struct.unpack('>I2', record, at)
  if bit.band(flags, 32) == 0 then return '', record:sub(1, at - 1), record:sub(at) end
  rest = at + 2 + struct.unpack('>I2', record, at)
  return record:sub(at + 2, rest - 1), record:sub(1, at - 1), record:sub(rest)
end

-- Return a record with these notes in their place.
local function with_notes(head, notes, tail)
  if head:find(LIVE) then return head .. struct.pack('>c1I4', 'X', #notes) .. notes .. tail end
  return head:sub(1, 1) .. string.char(bit.bor(head:byte(2), 32)) .. head:sub(3)
    .. struct.pack('>I2', #notes) .. notes .. tail
end

-- Return the last five refusals, and the last five interventions with all that belongs to them.
local function last_five(notes)
  local kept, at, refusals, interventions = '', 1, 0, 0
  while at <= #notes do
    local rest, refusal = at + 8 + notes:byte(at + 7), notes:find('^[cm]', at)
    if refusal then refusals = refusals + 1 end
    if notes:sub(at, at) == 'o' then interventions = interventions + 1 end
    if (refusal and refusals or interventions) <= 5 then kept = kept .. notes:sub(at, rest - 1) end
    at = rest
  end
  return kept
end

-- Return the notes with what an operator did now, behind the refusals; without it as they are.
local function intervened(notes, intervention, now)
  if intervention == '' then return notes end
  local at, size = 1, #intervention
  while notes:find('^[cm]', at) do at = at + 8 + notes:byte(at + 7) end
  local known = notes:sub(at)
  -- The same again, as when the answer was lost, takes the place of the last time.
  if known:sub(8, size) == intervention:sub(8) and not known:find('^[sw]', size + 1) then
    known = known:sub(size + 1)
  end
  return last_five(notes:sub(1, at - 1) .. 'o' .. struct.pack('>I6', now) .. intervention:sub(8) .. known)
end

-- Note in a record that somebody was refused: 'c' for a conflict, 'm' for a mismatch. Keeps five.
--
-- What the holder, a sweep or a settle goes by stays as it is. A record of more than 64 KiB takes no note: nobody shall
-- have it written again and again. Nor does a server that takes no writes at the moment, and it answers all the same.
local function refuse(name, record, kind, now, who)
  if #record > 65536 then return end
  local known, head, tail = notes_of(record)
  who = who:sub(1, 100)
  if known:sub(1, 1) == kind and known:byte(8) == #who and known:sub(9, 8 + #who) == who then
    known = known:sub(9 + #who)
  end
  record = with_notes(head, last_five(struct.pack('>c1I6B', kind, now, #who) .. who .. known), tail)
  redis.pcall('SET', name, record, 'KEEPTTL')
end

