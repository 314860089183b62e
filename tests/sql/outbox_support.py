"""What the tests of the outbox share: an app with its outbox, and what its broker was given."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

pytest.importorskip("django")

from django.apps import apps
from django.db import connections, transaction
from django.db.models import F, QuerySet

from celery_idempotent.django import IdempotentTask, outbox
from celery_idempotent.django.fields import NowMs


def make_app(alias: str, **conf: Any) -> Celery:
    """Return an app whose messages stay in this process."""
    name = f"outbox-{uuid.uuid4().hex[:8]}"
    app = Celery(name, set_as_current=False)
    conf = {
        "broker_url": "memory://",
        "result_backend": "cache+memory://",
        "idempotency_store": f"django://{alias}",
        "task_default_queue": name,
        **conf,
    }
    app.conf.update(idempotency_sweep_interval=None, task_publish_retry=False, **conf)
    keyed: dict[str, Any] = {"shared": False, "base": IdempotentTask, "idempotency_key": "n"}
    app.task(name="note", **keyed)(with_extra)
    app.task(name="once", idempotency_publish_once=True, **keyed)(with_extra)
    once: dict[str, Any] = {**keyed, "idempotency_publish_once": True, "idempotency_retention": 0}
    app.task(name="once_unretained", **once)(with_extra)
    app.task(name="free", shared=False, base=IdempotentTask)(anything)
    app.task(name="plain", shared=False)(anything)
    app.finalize()
    return app


def with_extra(n: int, extra: Any = None) -> int:
    return n


def anything(*args: Any) -> None:
    pass


def sent(app: Celery) -> list[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Take what the broker has in the app's queue: headers, body, and properties of each message."""
    found = []
    with app.connection_for_read() as connection:
        channel: Any = connection.channel()
        while message := channel.basic_get(app.conf.task_default_queue, no_ack=True):
            readable = message.content_type == "application/json"
            body = json.loads(message.body) if readable else message.body
            found.append((message.headers, body, message.properties))
    return found


def ids(app: Celery) -> list[str]:
    """Take what the broker has: the task ids."""
    return [headers["id"] for headers, _, _ in sent(app)]


class Stage:
    """One app and its outbox, as a test handles them."""

    def __init__(self, alias: str, app: Celery) -> None:
        self.alias, self.app, self.outbox = alias, app, outbox
        self.rows = apps.get_model("celery_idempotent", "OutboxMessage").objects.using(alias)

    def atomic(self) -> Any:
        return transaction.atomic(using=self.alias)

    def add(self, task: Any = "note", args: Any = None, **options: Any) -> str:
        task = self.app.tasks[task] if isinstance(task, str) else task
        task_id = self.outbox.stage(task, args, None, options, using=self.alias)
        assert task_id
        return task_id

    def notes(self, *numbers: int, **options: Any) -> list[str]:
        return [self.add("note", (number,), **options) for number in numbers]

    def dies_after_commit(self, *numbers: int, **options: Any) -> list[str]:
        """Stage and commit, and be gone before anything is sent."""
        with self.atomic():
            staged = self.notes(*numbers, **options)
            connections[self.alias].run_on_commit.clear()
        return staged

    @contextmanager
    def dies_before_delete(self) -> Iterator[None]:
        """Stage in a transaction whose process dies once its message is sent."""

        def die(*_: object) -> None:
            raise SystemExit

        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit), self.atomic():
            patch.setattr(QuerySet, "_raw_delete", die)
            yield

    def rolls_back(self, *numbers: int) -> None:
        with self.atomic():
            self.notes(*numbers)
            transaction.set_rollback(True, using=self.alias)

    def pass_time(self) -> None:
        """Let all leases and rests be over."""
        self.rows.update(due_ms=0)

    def sweep(self, **options: Any) -> Any:
        return self.outbox.sweep(self.app, using=self.alias, **options)

    def pending(self) -> list[Any]:
        """Return the messages that wait, oldest first, with their times as seen from now."""
        due, created = F("due_ms") - NowMs(), NowMs() - F("created_ms")
        return list(self.rows.order_by("pk").annotate(due_in_ms=due, age_ms=created))

    def break_broker(self, patch: pytest.MonkeyPatch) -> list[str]:
        """Fail to publish; returns the names of the tasks that were tried."""
        tried: list[str] = []

        def refuse(producer: Any, name: str, message: Any, **options: Any) -> Any:
            tried.append(name)
            raise OperationalError("amqp://user:secret@broker is away")

        patch.setattr(self.app.amqp, "send_task_message", refuse)
        return tried
