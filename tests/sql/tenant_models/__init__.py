"""A project's models of its tenants, for django-tenants."""
