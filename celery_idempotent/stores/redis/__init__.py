"""The records in Redis: verbs are Lua scripts, records are packed hashes."""
