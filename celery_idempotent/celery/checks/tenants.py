"""Checks of projects with several tenants."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from celery_idempotent.celery.checks.finding import Finding, Tasks, named

if TYPE_CHECKING:
    from celery import Celery


def unscoped(_app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks whose keys two tenants of django-tenants would share."""
    # Django imports each app that is installed; the core imports nothing of Django.
    if "django_tenants" not in sys.modules:
        return
    shared = [name for name, (_, each) in tasks.items() if each.identifier.lacks_scope]
    if shared:
        yield Finding(
            id="W024",
            problem="django-tenants is installed, and a key of these tasks is one key for all tenants: "
            f"{named(shared)}.",
            hint="Set idempotency_scope so that it names the tenant, as docs/tenants.md says.",
        )
