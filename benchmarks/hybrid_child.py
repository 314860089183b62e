"""Times a duplicate on three stores in turn, in a process that has Django; prints one JSON object a round."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connection, connections

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores import Store

ASKED: dict[str, Any] = {"lease_ms": 60_000, "keep_ms": 600_000, "fingerprint": bytes(16)}
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"1" * 100)


def main(url: str, directory: str, rounds: int, calls: int, seed: int) -> None:
    """Time ``calls`` of each a round, in another order each round; the first round warms up."""
    order = random.Random(seed)
    with database(directory):
        from celery_idempotent.django.store import DjangoStore
        from celery_idempotent.stores.hybrid.cache import RedisCache
        from celery_idempotent.stores.hybrid.store import HybridStore
        from celery_idempotent.stores.redis.store import RedisStore

        alone = DjangoStore()
        stores: dict[str, Store] = {
            "RedisStore": RedisStore(url),
            "HybridStore": HybridStore(RedisCache(url), DjangoStore()),
            f"DjangoStore ({connection.vendor})": alone,
        }
        for name, store in stores.items():
            complete(store, identity(name))
        for number in range(-1, rounds):
            names = order.sample(list(stores), len(stores))
            times = {name: duplicates(stores[name], identity(name), calls) for name in names}
            if number >= 0:
                print(json.dumps({name: times[name] for name in stores}), flush=True)
        for store in stores.values():
            store.close()


def identity(name: str) -> Identity:
    return Identity(namespace="bench", key=name)


def complete(store: Store, key: Identity) -> None:
    answer = store.claim(
        ClaimRequest(identity=key, attempt=os.urandom(8), task_id=str(uuid.uuid4()), **ASKED)
    )
    assert isinstance(answer, Claimed)
    assert store.settle(
        SettleRequest(record=answer.record, state=State.COMPLETED, value=VALUE, keep_ms=600_000)
    )


def duplicates(store: Store, key: Identity, calls: int) -> list[int]:
    clock, times = time.perf_counter_ns, []
    claim: Callable[..., object] = store.claim
    for _ in range(calls):
        attempt, task_id = os.urandom(8), str(uuid.uuid4())
        before = clock()
        answer = claim(ClaimRequest(identity=key, attempt=attempt, task_id=task_id, **ASKED))
        times.append(clock() - before)
        assert isinstance(answer, Settled)
    return times


@contextmanager
def database(directory: str) -> Iterator[None]:
    """Make a database with the tables: on the PostgreSQL that the environment names, else SQLite."""
    url = os.environ.get("CELERY_IDEMPOTENT_POSTGRESQL_URL", "")
    name = f"bench_idempotent_{uuid.uuid4().hex[:12]}"
    if url:
        parts = urlsplit(url)
        where: dict[str, Any] = {
            "ENGINE": "django.db.backends.postgresql",
            "USER": parts.username or "",
            "PASSWORD": parts.password or "",
            "HOST": parts.hostname or "",
            "PORT": str(parts.port or ""),
        }
        databases = {"default": {**where, "NAME": name}, "maker": {**where, "NAME": "postgres"}}
    else:
        file = f"{directory}/{name}.sqlite3"
        databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": file}}
    settings.configure(DATABASES=databases, INSTALLED_APPS=["celery_idempotent.django"])
    django.setup()
    if not url:
        call_command("migrate", verbosity=0)
        yield
        return
    with connections["maker"].cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        try:
            call_command("migrate", verbosity=0)
            yield
        finally:
            connections["default"].close()
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


if __name__ == "__main__":
    url, directory, *numbers = sys.argv[1:]
    main(url, directory, *map(int, numbers))
