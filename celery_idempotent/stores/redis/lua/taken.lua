-- What claim.lua and reserve.lua share about a key that has a record already.

--include live.lua
-- Was the record written by a newer version?
local function unreadable(old)
  if old:find(LIVE) then return foreign(old) end
  return not old:find(ENDED) or old:byte(2) > 127
end

-- Return the fingerprint that the key has from now on, and where the record goes on after its own; nil if they differ.
local function agreed(old, fingerprint)
  local at = old:find(LIVE) and 38 or 24
  if old:byte(2) % 2 == 0 then return fingerprint, at end
  local known = old:sub(at, at + 15)
  if fingerprint ~= '' and fingerprint ~= known then return nil end
  return known, at + 16
end

