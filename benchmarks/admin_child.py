"""Fills a store with completed records, then opens the admin's pages; prints the milliseconds of each, a round a line.

Prints nothing where there is no such server.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

#: So many records are written at once.
_CHUNK = 10_000
_NAMESPACE, _RESULT = "bench.admin", b'"' + b"x" * 98 + b'"'
_LIST = "/admin/celery_idempotent/idempotencyrecord/"


def main(arguments: Sequence[str]) -> None:
    """Measure."""
    kind, redis_url, directory, records, rounds = arguments
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DATABASE_PATH": f"{directory}/{kind}.sqlite3",
    }
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    if kind == "redis":
        _fill_redis(redis_url, int(records))
        _measure(redis_url, int(records), int(rounds))
        return
    with _postgresql() as found:
        if found:
            call_command("migrate", "celery_idempotent", database="bench", verbosity=0)
            _fill_postgresql(int(records))
            _measure("django://bench", int(records), int(rounds))


def _measure(url: str, records: int, rounds: int) -> None:
    from celery import Celery
    from django.conf import settings
    from django.contrib.admin.utils import quote
    from django.contrib.auth.models import User
    from django.test import Client

    from celery_idempotent.django.admin.identities import unparse
    from celery_idempotent.records import Identity

    app = Celery(
        "bench", broker=url if url.startswith("redis") else "memory://", set_as_current=False
    )
    app.conf.idempotency_store = url
    settings.CELERY_IDEMPOTENT_APP = app
    user = User.objects.create_superuser("bench", password=None)
    client = Client(SERVER_NAME="localhost")
    client.force_login(user)
    key = f"key-{records // 2}"
    name = quote(unparse(Identity(namespace=_NAMESPACE, key=key)))
    pages = {
        "list": _LIST,
        "list, one of 50 pages further on": "",
        "list, nothing found among 5,000 keys": f"{_LIST}?state=COMPLETED&scope=nobody",
        "list of failed": f"{_LIST}?state=FAILED",
        "search for a key": f"{_LIST}?key={key}&task={_NAMESPACE}",
        "record": f"{_LIST}{name}/change/",
        "charts": f"{_LIST}charts/",
    }
    pages["list, one of 50 pages further on"] = _further(client, 50)
    for _ in range(rounds):
        times = {}
        for page, address in pages.items():
            began = time.perf_counter()
            answer: Any = client.get(address)
            times[page] = (time.perf_counter() - began) * 1000
            if answer.status_code != 200:
                raise RuntimeError(f"{page} answered {answer.status_code}")
            if page in {"search for a key", "record"} and key not in answer.content.decode():
                raise RuntimeError(f"{page} does not show {key}")
        print(json.dumps(times), flush=True)


def _further(client: Any, pages: int) -> str:
    address = _LIST
    for _ in range(pages):
        answer = client.get(address)
        if not answer.context_data["more"]:
            break
        address = _LIST + answer.context_data["more"]
    return address


def _fill_redis(url: str, records: int) -> None:
    import redis

    from celery_idempotent.records import Identity, Record, SettleRequest, State, Stored
    from celery_idempotent.stores.redis.keyspace import Keyspace
    from celery_idempotent.stores.redis.packed import pack_settled

    client = redis.Redis.from_url(url)
    now, keys = time.time_ns() // 1_000_000, Keyspace("idem")
    for start in range(0, records, _CHUNK):
        pipe = client.pipeline(transaction=False)
        for number in range(start, min(start + _CHUNK, records)):
            identity = Identity(namespace=_NAMESPACE, key=f"key-{number}")
            record = Record(
                identity=identity,
                state=State.COMPLETED,
                token=now * 1000 + number,
                created_ms=now,
                updated_ms=now,
                task_id=str(uuid.UUID(int=number)),
            )
            value = Stored(content_type="application/json", content_encoding="utf-8", body=_RESULT)
            end = SettleRequest(
                record=record, state=State.COMPLETED, value=value, keep_ms=86_400_000
            )
            packed = pack_settled(end)
            pipe.set(keys.locate(identity)[1], packed, px=86_400_000)
        pipe.execute()
    client.close()


@contextlib.contextmanager
def _postgresql() -> Iterator[bool]:
    """Make a database that Django knows as ``bench``; drop it in the end."""
    from django.db import Error, connections

    url = urlsplit(
        os.environ.get("CELERY_IDEMPOTENT_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432")
    )
    name = f"bench_idempotent_{uuid.uuid4().hex[:12]}"
    about = {
        "ENGINE": "django.db.backends.postgresql",
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.hostname or "",
        "PORT": str(url.port or ""),
    }
    databases: dict[str, Any] = connections.databases
    databases["maintenance"] = {**about, "NAME": "postgres"}
    databases["bench"] = {**about, "NAME": name}
    connections.configure_settings(databases)
    try:
        connections["maintenance"].ensure_connection()
    except Error:
        yield False
        return
    with connections["maintenance"].cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    try:
        yield True
    finally:
        connections["bench"].close()
        with connections["maintenance"].cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _fill_postgresql(records: int) -> None:
    from django.db import connections

    from celery_idempotent.django.sql.columns import digest
    from celery_idempotent.records import Identity, Stored
    from celery_idempotent.stores.values import pack_value

    now = time.time_ns() // 1_000_000
    value = pack_value(
        Stored(content_type="application/json", content_encoding="utf-8", body=_RESULT)
    )
    with connections["bench"].cursor() as cursor:
        statement = (
            "COPY celery_idempotent_record (token, created_ms, updated_ms, expires_ms, prune_ms, version,"
            " crashes, attempts, state, reserved, replaced, delivered, digest, namespace, scope, key, task_id,"
            " value) FROM STDIN"
        )
        rows: Any = cursor.copy(statement)
        with rows as copy:
            for number in range(records):
                key = f"key-{number}"
                end = now + 86_400_000
                name = digest(Identity(namespace=_NAMESPACE, key=key))
                times = (now * 1000 + number, now, now, end, end)
                rest = (1, 0, 1, "C", False, False, False, name, _NAMESPACE, "", key)
                copy.write_row((*times, *rest, str(uuid.UUID(int=number)), value))
        cursor.execute("ANALYZE celery_idempotent_record")


if __name__ == "__main__":
    main(sys.argv[1:])
