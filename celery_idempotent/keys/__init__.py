"""Which operation a call is: its key, scope and fingerprint, and how a message carries them."""
