"""Beat with its schedule in the database (django-celery-beat): the row of the sweep is as the app's settings are."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("django_celery_beat")

from tests.support.workers import child_environment

SITE = """
import json, sys

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_celery_beat"],
    MIGRATION_MODULES={"django_celery_beat": None},
    USE_TZ=True,
)
django.setup()

from celery import Celery, signals
from celery.beat import Service
from django.core.management import call_command
from django_celery_beat.models import PeriodicTask
from django_celery_beat.schedulers import DatabaseScheduler

from celery_idempotent import IdempotentTask

class Scheduler(DatabaseScheduler):
    def tick(self):
        service._is_shutdown.set()  # all that is asked for is how it begins
        return 0

call_command("migrate", run_syncdb=True, verbosity=0)
rows = PeriodicTask.objects.filter(task="celery_idempotent.sweep")
told = []

def work(): ...

for change, given in json.loads(sys.argv[1]):
    rows.update(**change)
    app = Celery("site", broker="memory://", backend="cache+memory://")
    app.conf.update(idempotency_store="memory://", **given)
    app.task(name="work", base=IdempotentTask)(work)
    app.finalize()
    service = Service(app, scheduler_cls=Scheduler)
    service.start()
    told.append(list(rows.values("name", "enabled", "expire_seconds", "description")))
print(json.dumps(told))
"""


def begin(*phases: tuple[dict[str, Any], dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Change the rows and let beat begin with these settings, phase by phase; return the rows after each."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SITE, json.dumps(phases)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_row_expires_and_follows_the_setting_but_not_where_people_made_or_disabled_it() -> None:
    off = {"idempotency_sweep_interval": None}
    phases = begin(
        ({}, {"idempotency_sweep_interval": 20}),
        ({}, off),
        ({}, {}),
        ({"enabled": False}, {}),
        ({"enabled": True, "name": "our own"}, off),
    )
    first, switched_off, on_again, disabled, own = (row for (row,) in phases)
    assert (first["enabled"], first["expire_seconds"]) == (True, 20)
    assert switched_off["enabled"] is False
    assert (on_again["enabled"], on_again["expire_seconds"]) == (True, 30)
    assert on_again["description"] == ""
    assert disabled["enabled"] is False
    assert (own["name"], own["enabled"]) == ("our own", True)
