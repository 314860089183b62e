"""Records in every state, and people with permissions, for tests of the admin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.records import (
    Identity,
    Record,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores import Store
from tests.support.records import claim_key
from tests.support.waiting import wait_for

TASK = "shop.charge"
PERMISSIONS = (
    "view_idempotencyrecord",
    "view_result",
    "release_record",
    "requeue_record",
    "complete_record",
    "fail_record",
    "forget_record",
)


def make_app(store: Store | str, **settings: Any) -> Celery:
    """A Celery app with one idempotent task, that is not the current one."""
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(
        idempotency_store=store, broker_transport_options={"visibility_timeout": 3600}, **settings
    )

    @app.task(
        name=TASK, base=IdempotentTask, idempotency_key="order", shared=False, ignore_result=False
    )
    def charge(order: str, amount: int = 0) -> int:
        return amount

    app.finalize()
    return app


def identity(key: str, *, namespace: str = TASK, scope: str = "") -> Identity:
    """A key of the app's task."""
    return Identity(namespace=namespace, scope=scope, key=key)


def claim(
    store: Store,
    about: Identity | str,
    *,
    lease_ms: int = 600_000,
    keep_ms: int = 3_600_000,
    **more: Any,
) -> Record:
    """Claim a key as a worker would."""
    more.setdefault("task_id", "5b0d3c5e-0000-4000-8000-000000000001")
    more.setdefault("worker", "worker-1.example:4711")
    more.setdefault("fingerprint", bytes(range(16)))
    about = identity(about) if isinstance(about, str) else about
    return claim_key(store, about, lease_ms=lease_ms, keep_ms=keep_ms, **more)


def value(text: str, content_type: str = "application/json", encoding: str = "utf-8") -> Stored:
    """A result, as it was written."""
    return Stored(content_type=content_type, content_encoding=encoding, body=text.encode())


def settle(
    store: Store,
    record: Record,
    state: Any = State.COMPLETED,
    stored: Stored | None = None,
    error: str = "",
) -> None:
    """Settle a claim as a worker would."""
    if state is State.FAILED and stored is not None:
        error = error or "CardDeclined: Ada is out of money"
    end = SettleRequest(record, state, stored, keep_ms=3_600_000, error=error)
    assert store.settle(end)


def fill(store: Store) -> None:
    """Put a record of each kind into a store."""
    settle(store, claim(store, "done"), stored=value('{"the <b>result</b>": 4217}'))
    settle(store, claim(store, identity("done", scope="tenant-1")))
    settle(store, claim(store, identity("elsewhere", namespace="shop.ship")))
    declined = value('{"exc_type": "Declined", "exc_message": ["no funds"], "exc_module": "shop"}')
    settle(store, claim(store, "failed"), State.FAILED, declined, "Declined: no funds")
    claim(store, "live")
    claim(store, "stale", lease_ms=1)
    lost = claim(store, "interrupted")
    store.interrupt(lost.identity, token=lost.token)
    message = ReserveRequest(
        identity=identity("queued"), task_id="t", deadline_ms=600_000, keep_ms=600_000
    )
    store.reserve(message)
    wait_for(lambda: store.stats().stale, what="a lease that ran out")


def make_user(name: str, permissions: Iterable[str] = (), *, password: str | None = None) -> Any:
    """Somebody who may log in to the admin, with these permissions of ours."""
    from django.contrib.auth.models import Permission, User

    user = User.objects.create_user(name, password=password, is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label="celery_idempotent", codename__in=list(permissions)
        )
    )
    return user
