"""``celery -A … idempotency …`` in a Django project: PostgreSQL, a cache before it, the admin's log."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("django")

from celery_idempotent.records import State
from celery_idempotent.stores import open_store
from tests.cli.running import run_idempotency
from tests.sql import databases as own
from tests.support.admin import claim, settle
from tests.support.servers import need

TASK = "testproject.payments.tasks.pay"


def test_all_that_is_stored_of_a_user_is_forgotten_and_who_did_it_is_in_the_admins_log(
    tmp_path, databases
):
    """A user asked to be forgotten: requests and tasks have one scope, made by one function."""
    url = next(databases)
    with own.ready(tmp_path):
        need(own.available("postgresql"), "a server of postgresql")
        with own.database("postgresql", tmp_path) as settings:
            alias = own.add_alias("cli_postgresql", settings)
            own.migrate(alias, ())
            try:
                _forget(tmp_path, alias, url, settings)
            finally:
                own.drop_alias(alias)


def _forget(directory, alias, redis_url, settings):
    from django.contrib.auth.models import User

    from celery_idempotent.django import user_scope
    from celery_idempotent.http.requests import http_identity

    alice = User.objects.db_manager(alias).create_user("alice")
    bob = User(pk=alice.pk + 1)
    hybrid = f"hybrid+{redis_url}?truth={{}}&prefix=cache"
    store = open_store(hybrid.format(alias))
    for number, user in itertools.product(range(21), (alice, bob)):
        about = http_identity("http", user_scope(user), f"order-{number}")
        settle(store, claim(store, about), State.FAILED)
        settle(store, claim(store, replace(about, namespace=TASK)))
    store.close()
    env = {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DATABASE_NAME": settings["NAME"],
        "PGHOST": settings["HOST"],
        "PGPORT": settings["PORT"],
        "PGUSER": settings["USER"],
        "PGPASSWORD": settings["PASSWORD"],
        "REDIS_URL": redis_url,
        "IDEMPOTENCY_STORE": hybrid.format("default"),
    }
    words = ("forget", "--all", "--scope", f'["user", {alice.pk}]', "--yes", "--json")
    done = run_idempotency("testproject", env, *words, "--who", "alice", "--reason", "she asked")
    assert done.code == 0, done.text
    assert [line["outcome"] for line in done.objects] == ["done"] * 42
    query = "SELECT scope, count(*) FROM celery_idempotent_record GROUP BY 1"
    assert own.rows(alias, query) == [(f'["user",{bob.pk}]', 42)]
    query = "SELECT DISTINCT user_id, change_message FROM django_admin_log"
    assert own.rows(alias, query) == [(alice.pk, "Forgotten. Reason: she asked")]
    health = run_idempotency("testproject", env, "check", "--health")  # which asks the outbox
    assert [line["outbox"]["well"] for line in health.objects] == [True], health.text
