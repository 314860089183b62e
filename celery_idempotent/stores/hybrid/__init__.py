"""A cache of Redis before a store in a database."""
