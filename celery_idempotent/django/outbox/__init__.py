"""Calls that are published if their transaction commits, and only then."""
