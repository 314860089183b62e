"""What the templates of this app load."""
