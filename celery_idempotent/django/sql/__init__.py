"""The records in a database, through Django's connections."""
