"""A tenant, and its domains."""

from __future__ import annotations

from django_tenants.models import DomainMixin, TenantMixin


class Shop(TenantMixin):  # type: ignore[misc]  # not typed
    """One tenant."""

    auto_create_schema = True


class Domain(DomainMixin):  # type: ignore[misc]  # not typed
    """Where it is found."""
