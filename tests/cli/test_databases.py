"""``celery -A … idempotency …`` in a Django project: PostgreSQL, a cache before it, the outbox, the admin's log."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from celery_idempotent.stores import open_store
from tests.cli.projects import TASK, Project, open_project
from tests.sql import databases as own
from tests.support.admin import claim, settle
from tests.support.waiting import wait_for
from tests.support.workers import Worker


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, databases: Iterator[str]
) -> Iterator[Project]:
    """Payments made by one worker: one done, one refused; a message that nobody sent; a user called alice."""
    directory = tmp_path_factory.mktemp("project")
    with open_project(directory, next(databases)) as project:
        _pay(project, directory)
        yield project


def _pay(project: Project, directory: Any) -> None:
    from celery_idempotent.django.fields import NowMs
    from celery_idempotent.django.models import OutboxMessage

    publisher = Celery("publisher", broker=project.redis_url, set_as_current=False)
    worker = Worker("testproject", directory=directory, name="payments", env=project.env)
    worker.start(timeout=60)
    try:
        for key, recipient in (("order-1", "acct_1"), ("order-2", "acct_closed")):
            about: dict[str, Any] = {"idempotency_key": key, "idempotency_scope": "acme"}
            publisher.send_task(
                TASK, (project.alice, 100, "EUR", recipient), task_id=f"t-{key}", headers=about
            )
        query = "SELECT 1 FROM celery_idempotent_record WHERE state IN ('C', 'F')"
        wait_for(lambda: len(own.rows(project.alias, query)) == 2, 30, "two payments")
    finally:
        worker.kill()
        publisher.close()
    message = OutboxMessage(
        app="testproject",
        task=TASK,
        task_id="t-3",
        key="order-3",
        scope="acme",
        payload=b"",
        created_ms=NowMs(),
        due_ms=NowMs() + 60_000,
    )
    message.save(using=project.alias)


def test_a_named_user_is_in_the_admins_log_and_a_scope_is_forgotten_with_its_outbox(project):
    """One way through, in this order: each step takes away what the one before needed."""
    reason = "refunded, called the bank"
    words = ("forget", "order-2", "--task", TASK, "--scope", "acme", "--yes", "--reason", reason)
    done = project.run("hybrid", *words, "--who", "alice")
    assert done.code == 0, done.text
    query = "SELECT u.username, l.change_message FROM django_admin_log l JOIN auth_user u ON u.id = l.user_id"
    ((who, message),) = own.rows(project.alias, query)
    assert who == "alice"
    assert message == f"Forgotten. Reason: {reason}"

    some = project.run("hybrid", "forget", "--all", "--scope", "acme", "--state", "FAILED", "--yes")
    assert some.code == 0, some.text
    assert len(own.rows(project.alias, "SELECT 1 FROM celery_idempotent_outbox")) == 1

    forgotten = project.run("hybrid", "forget", "--all", "--scope", "acme", "--yes", "--json")
    assert forgotten.code == 0, forgotten.text
    (line,) = forgotten.objects
    assert (line["key"], line["outcome"]) == ("order-1", "done")
    assert own.rows(project.alias, "SELECT 1 FROM celery_idempotent_record") == []
    assert own.rows(project.alias, "SELECT 1 FROM celery_idempotent_outbox") == []


def test_all_that_is_stored_of_a_user_is_forgotten(project):
    """A user asked to be forgotten: requests and tasks have one scope, made by one function."""
    from django.contrib.auth.models import User

    from celery_idempotent.django import user_scope
    from celery_idempotent.http.keys import http_identity

    alice, bob = User(pk=project.alice), User(pk=project.alice + 1)
    store = open_store(f"django://{project.alias}")
    task: Any = import_module(TASK.rpartition(".")[0]).pay
    identity_of = task.idempotency_definition().identifier.identity
    for number in range(41):
        key = f"order-{number}"
        for about in (
            http_identity("http", user_scope(alice), key),
            identity_of(key, user_scope(alice)),
            identity_of(f"refund-{number}", user_scope(alice)),
            identity_of(key, user_scope(bob)),
        ):
            settle(store, claim(store, about))
    done = project.run(
        "sql", "forget", "--all", "--scope", f"user {project.alice}", "--yes", "--json"
    )
    assert done.code == 0, done.text
    assert len(done.objects) == 123
    assert {line["outcome"] for line in done.objects} == {"done"}
    left = own.rows(
        project.alias, "SELECT scope, count(*) FROM celery_idempotent_record GROUP BY 1"
    )
    assert left == [(f'["user",{bob.pk}]', 41)]
