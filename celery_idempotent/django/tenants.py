"""One schema has the tables: with django-tenants the app belongs to the shared apps alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

APP = "celery_idempotent.django"


def refuse_tenant_tables() -> None:
    """Raise unless the tables are in the public schema, and in no other.

    A verb on the thread's connection would read the schema of its tenant, the heartbeat that of the public: a claim
    would never be renewed.

    Raises:
        ImproperlyConfigured: if the settings of django-tenants name the app in another place.
    """
    shared, tenants = _apps_of_schemas()
    if not shared and not tenants:
        return
    here = [
        any(each == APP or each.startswith(f"{APP}.apps.") for each in names)
        for names in (shared, tenants)
    ]
    if here != [True, False]:
        raise ImproperlyConfigured(
            f"{APP} must be in SHARED_APPS and not in TENANT_APPS: claims, renewals and sweeps use one schema, and a "
            "second set of its tables would hide the first. The idempotency_scope separates tenants."
        )


def _apps_of_schemas() -> tuple[Collection[str], Collection[str]]:
    """Return the apps of the public schema, and those of tenants."""
    if not getattr(settings, "HAS_MULTI_TYPE_TENANTS", False):
        return getattr(settings, "SHARED_APPS", ()), getattr(settings, "TENANT_APPS", ())
    types: Mapping[str, Mapping[str, Any]] = getattr(settings, "TENANT_TYPES", {})
    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    tenants = [app for name, each in types.items() if name != public for app in each["APPS"]]
    return types.get(public, {}).get("APPS", ()), tenants
