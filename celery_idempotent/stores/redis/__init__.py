"""Records in Redis: the table decides in Python, short scripts look and swap."""
