-- Store the result of a task that a record answered.
--
-- KEYS     1 where a Redis result backend has the result
-- ARGV     1 the result, encoded · 2 how long to keep it, s, or '' for ever
-- returns  'stored', or nil where it is left to its backend
--include result.lua
return store_result(KEYS[1], ARGV[1], ARGV[2])
