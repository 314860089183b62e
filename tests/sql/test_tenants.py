"""Schemas of django-tenants: a project whose tenants would have tables of their own does not start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django")

from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from celery_idempotent.django.tenants import refuse_tenant_tables
from tests.sql import databases
from tests.support.workers import child_environment

OURS, OTHER = "celery_idempotent.django", "shop"
CONFIG = "celery_idempotent.django.apps.IdempotencyConfig"


def types(public: list[str], tenant: list[str]) -> dict[str, Any]:
    apps = {"public": {"APPS": public}, "shops": {"APPS": tenant}}
    return {"HAS_MULTI_TYPE_TENANTS": True, "TENANT_TYPES": apps}


@pytest.mark.parametrize(
    "settings",
    [
        {"SHARED_APPS": [OURS, OTHER], "TENANT_APPS": [OURS, OTHER]},
        {"SHARED_APPS": [OTHER], "TENANT_APPS": [OURS]},
        {"SHARED_APPS": [CONFIG], "TENANT_APPS": [CONFIG]},
        types([OURS], [OURS]),
        types([OTHER], [OURS]),
    ],
)
@pytest.mark.usefixtures("sql_databases")
def test_tables_in_the_schema_of_a_tenant_are_refused(settings: dict[str, Any]):
    with (
        override_settings(**settings),
        pytest.raises(ImproperlyConfigured, match="SHARED_APPS and not in TENANT_APPS"),
    ):
        refuse_tenant_tables()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"SHARED_APPS": [OURS], "TENANT_APPS": [OTHER]},
        {"SHARED_APPS": [CONFIG], "TENANT_APPS": [OTHER]},
        types([OURS], [OTHER]),
    ],
)
@pytest.mark.usefixtures("sql_databases")
def test_tables_in_the_shared_schema_alone_are_accepted(settings: dict[str, Any]):
    with override_settings(**settings):
        refuse_tenant_tables()


SITE = """
import json, os, sys, threading

import django
from django.conf import settings

database, both = json.loads(sys.argv[1])
database["ENGINE"] = "django_tenants.postgresql_backend"
shared = ["django_tenants", "tests.sql.tenant_models", "celery_idempotent.django"]
tenant = ["django.contrib.contenttypes", *(["celery_idempotent.django"] if both else [])]
settings.configure(
    DATABASES={"default": database},
    DATABASE_ROUTERS=["django_tenants.routers.TenantSyncRouter"],
    SHARED_APPS=shared,
    TENANT_APPS=tenant,
    INSTALLED_APPS=[*shared, *(app for app in tenant if app not in shared)],
    TENANT_MODEL="tenant_models.Shop",
    TENANT_DOMAIN_MODEL="tenant_models.Domain",
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command
from django.db import connection, transaction
from django_tenants.utils import schema_context

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Claimed, ClaimRequest, Held, Identity, Renewal

call_command("migrate_schemas", shared=True, verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("CREATE SCHEMA north; CREATE SCHEMA south")

store = DjangoStore()

def ask(key="17"):
    identity = Identity(namespace="pay", key=key)
    return store.claim(ClaimRequest(identity=identity, attempt=os.urandom(8), lease_ms=60_000, keep_ms=60_000))

with schema_context("north"):
    claimed = ask()
    assert isinstance(claimed, Claimed)
    record = claimed.record
    renewal = Renewal(identity=record.identity, token=record.token, lease_ms=60_000, keep_ms=60_000)
    renewed = []
    heartbeat = threading.Thread(target=lambda: renewed.extend(store.renew([renewal])))
    heartbeat.start()
    heartbeat.join()
    assert renewed == [True], "the thread of the heartbeat sees no claim"
    with transaction.atomic():
        assert isinstance(ask(), Held), "a connection of the store's own sees no claim"
with schema_context("south"):
    assert isinstance(ask(), Held), "another tenant sees no claim"
    with store.transaction(record):
        pass  # the claim is found, or LeaseLost is raised
assert isinstance(ask(), Held)
"""


def start(settings: dict[str, Any], *, both: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SITE, json.dumps([settings, both])],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def tenant_database(sql_databases: Callable[..., Any], tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A database without tables on PostgreSQL."""
    pytest.importorskip("django_tenants")
    sql_databases("postgresql")
    with databases.database("postgresql", tmp_path) as settings:
        yield settings


def test_every_tenant_and_every_connection_sees_one_set_of_records(tenant_database: dict[str, Any]):
    done = start(tenant_database, both=False)
    assert done.returncode == 0, done.stderr


def test_a_project_with_tables_in_both_does_not_start(tenant_database: dict[str, Any]):
    done = start(tenant_database, both=True)
    assert "SHARED_APPS and not in TENANT_APPS" in done.stderr
