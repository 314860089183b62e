"""What the templates of the admin load."""
