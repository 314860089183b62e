"""``make demo``: webhooks as the internet delivers them, on workers that are killed at work."""
