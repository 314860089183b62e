"""What the settings of a project say about the store in its database: refused, or told by a check; and its imports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.checks import check_settings
from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from tests.support.programs import run

pytest.importorskip("django")

from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from celery_idempotent.django.store import DjangoStore, open_django
from celery_idempotent.django.tenants import refuse_tenant_tables
from tests.sql import databases
from tests.sql.databases import execute
from tests.sql.verbs import claim


@pytest.mark.parametrize("vendor", databases.VENDORS)
def test_a_database_without_autocommit_is_refused(use_database: Callable[..., str], vendor: str):
    alias = use_database(vendor, AUTOCOMMIT=False)
    with pytest.raises(InvalidOption, match="leave AUTOCOMMIT on"):
        open_django(f"django://{alias}")


READ_ONLY = {
    "postgresql": {"options": "-c default_transaction_read_only=on"},
    "mariadb": {"init_command": "SET SESSION TRANSACTION READ ONLY"},
}


@pytest.mark.parametrize("vendor", READ_ONLY)
def test_a_role_that_may_only_read_is_a_matter_of_settings(
    use_database: Callable[..., str], vendor: str
):
    use_database(vendor)  # empties it
    store = DjangoStore(use_database(vendor, options=READ_ONLY[vendor]))
    with pytest.raises(StoreMisconfigured, match="is read-only"):
        claim(store)
    store.close()


def test_a_standby_is_away_for_it_is_the_former_primary_or_the_next_one(
    use_database: Callable[..., str],
):
    """Each try is made on a new connection, which may lead to the new primary."""
    writer = use_database("postgresql")
    options = f"{READ_ONLY['postgresql']['options']} -c search_path=standby,public,pg_catalog"
    execute(writer, "CREATE SCHEMA standby")
    try:
        execute(
            writer,
            "CREATE FUNCTION standby.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true'",
        )
        store = DjangoStore(use_database("postgresql", options={"options": options}))
        with pytest.raises(StoreUnavailable, match="standby"):
            claim(store)
        assert store.connections._idle == []
    finally:
        execute(writer, "DROP SCHEMA standby CASCADE")


class Router:
    """Sends the models of one app to a database, and all others elsewhere."""

    def __init__(self, alias: str, app: str) -> None:
        self.alias, self.app = alias, app

    def db_for_write(self, model: Any, **_: object) -> str:
        return self.alias if model._meta.app_label == self.app else "default"


def findings(alias: str, *, atomic: bool = True, routers: Any = ()) -> dict[str, str]:
    """Return what the checks say about atomic tasks."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = f"django://{alias}"

    @app.task(base=IdempotentTask, shared=False, name="shop.pay", idempotency_atomic=atomic)
    def pay() -> None: ...

    with override_settings(DATABASE_ROUTERS=list(routers)):
        found = check_settings(app)

    return {each.id: each.problem for each in found if each.id in ("W025", "W026")}


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
def test_a_check_says_that_sqlite_cannot_end_a_frozen_run(
    use_database: Callable[..., str], vendor: str
):
    alias = use_database(vendor)
    routers = [Router(alias, "auth")]
    assert ("W025" in findings(alias, routers=routers)) == (vendor == "sqlite")
    assert findings(alias, atomic=False) == {}


def test_a_check_says_where_no_model_is_written_to_the_database_of_atomic_tasks(
    use_database: Callable[..., str],
):
    """As without a router, which has all of them in ``default``; our own tables do not count."""
    alias = use_database("postgresql")
    for routers in ([], [Router(alias, "celery_idempotent")]):
        found = findings(alias, routers=routers)
        assert "shop.pay" in found["W026"]
        assert alias in found["W026"]
    assert findings(alias, routers=[Router(alias, "auth")]) == {}
    assert "W026" not in findings("default")


PROGRAM = """
import sys
from celery_idempotent.stores import open_store
open_store("django://")  # Django may be configured later
from django.conf import settings
engine = "django.db.backends.{engine}"
settings.configure(DATABASES={{"default": {{"ENGINE": engine, "NAME": "not_to_be_opened"}}}})
if "{engine}" == "mysql":
    import pymysql
    pymysql.install_as_MySQLdb()
open_store("django://")
assert engine + ".base" in sys.modules
before = set(sys.modules)
from django.db import connections
wrapper = connections["default"]
assert wrapper.connection is None
assert set(sys.modules) == before
"""


@pytest.mark.parametrize(
    "engine",
    [
        "postgresql",
        pytest.param("mysql", marks=pytest.mark.wide),
        pytest.param("sqlite3", marks=pytest.mark.wide),
    ],
)
def test_a_store_imports_its_database_when_it_is_made_and_not_with_its_first_verb(engine: str):
    run("-c", PROGRAM.format(engine=engine))


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


@pytest.fixture
def tenant_database(sql_databases: Callable[..., Any], tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A database without tables on PostgreSQL."""
    pytest.importorskip("django_tenants")
    sql_databases("postgresql")
    with databases.database("postgresql", tmp_path) as settings:
        yield settings


def test_every_tenant_and_every_connection_sees_one_set_of_records(tenant_database: dict[str, Any]):
    run("-W", "ignore", "-c", SITE, json.dumps([tenant_database, False]), timeout=120)


def test_a_project_with_tables_in_both_does_not_start(tenant_database: dict[str, Any]):
    both = json.dumps([tenant_database, True])
    done = run("-W", "ignore", "-c", SITE, both, timeout=120, code=1)
    assert "SHARED_APPS and not in TENANT_APPS" in done.stderr
