"""Deletes a table full of records in several ways, in a process of its own; prints one JSON object each."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.postgresql import execute, open_database, rows

_FILL = (
    "INSERT INTO {table} (token, created_ms, updated_ms, expires_ms, prune_ms, version, crashes,"
    " attempts, state, reserved, replaced, delivered, digest, fingerprint, namespace, scope, key,"
    " task_id, value)"
    " SELECT 1, 1, 1, 1, n, 1, 0, 1, 'C', false, false, false,"
    " substring(sha256(n::text::bytea) for 16), substring(sha256(n::text::bytea) from 17),"
    " 'shop.tasks.charge', '', '\"order-' || lpad(n::text, 20, '0') || '\"',"
    " '6ff5d5ba-6ff1-4b4f-8f0e-4f0f2f1f0f3f', repeat('r', 100)::bytea"
    " FROM generate_series(1, {count}) AS n"
)


def main(count: int) -> None:
    """Measure each way on the same rows."""
    with open_database() as name:
        from celery_idempotent.django.sql import upkeep
        from celery_idempotent.django.store import DjangoStore

        store = DjangoStore()
        for batch in (1_000, 10_000, 100_000):
            upkeep.PRUNE_BATCH = batch
            _measure(name, f"batches of {batch:,}", count, lambda: _prune(store, count))
        upkeep.PRUNE_BATCH = 1_000
        for how, words in (("SKIP LOCKED", True), ("waiting for each other", False)):
            with _skipping(words):
                _measure(name, f"two at once, {how}", count, lambda: _twice(store, count))
        _partition(name, count)
        store.close()


def _measure(
    name: str, what: str, count: int, do: Callable[[], object], *, fill: bool = True
) -> None:
    if fill:
        execute("TRUNCATE celery_idempotent_record")
        execute(_FILL.format(table="celery_idempotent_record", count=count))
        execute("VACUUM ANALYZE celery_idempotent_record")
        execute("CHECKPOINT")
    bystander = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.prune_bystander", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bystander.stdout is not None
    bystander.stdout.readline()  # it is at work
    ((wal,),) = rows("SELECT pg_current_wal_insert_lsn()")
    before = time.perf_counter()
    do()
    took = time.perf_counter() - before
    seen = json.loads(bystander.communicate()[0])
    ((wrote,),) = rows("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", (wal,))
    before = time.perf_counter()
    execute("VACUUM celery_idempotent_record")
    vacuum = time.perf_counter() - before
    figures = {"seconds": took, "wal_mb": float(wrote) / 1e6, "vacuum_s": vacuum, **seen}
    print(json.dumps({"what": what, **figures}), flush=True)


def _prune(store: Any, count: int) -> None:
    assert store.prune(limit=2 * count) == count


def _twice(store: Any, count: int) -> None:
    gone: list[int] = []
    threads = [
        threading.Thread(target=lambda: gone.append(store.prune(limit=2 * count))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _skipping:  # noqa: N801 - used as a function
    """Lets a prune wait for the rows of another one, or not."""

    def __init__(self, skip: bool) -> None:
        from django.db.backends.postgresql.features import DatabaseFeatures

        self._features: Any = DatabaseFeatures
        self._skip = skip

    def __enter__(self) -> None:
        self._features.has_select_for_update_skip_locked = self._skip

    def __exit__(self, *_: object) -> None:
        self._features.has_select_for_update_skip_locked = True


def _partition(name: str, count: int) -> None:
    execute("TRUNCATE celery_idempotent_record")
    execute(
        "CREATE TABLE parted (LIKE celery_idempotent_record INCLUDING IDENTITY)"
        " PARTITION BY RANGE (prune_ms)"
    )
    execute("CREATE TABLE day PARTITION OF parted FOR VALUES FROM (0) TO (100000000)")
    execute("CREATE UNIQUE INDEX ON parted (digest, prune_ms)")
    execute("CREATE INDEX ON parted (prune_ms)")
    execute(_FILL.format(table="parted", count=count))
    execute("CHECKPOINT")
    _measure(name, "a partition dropped", count, lambda: execute("DROP TABLE day"), fill=False)


if __name__ == "__main__":
    main(int(sys.argv[1]))
