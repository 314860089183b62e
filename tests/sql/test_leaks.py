"""A worker's process holds after a thousand runs what it held after three hundred."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from tests.sql import databases
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.wide]

PATIENCE = 180
#: By the first look the caches of 256 identities are full.
FIRST, LAST = 300, 1000
#: A leak is an object for each of the 700 runs in between that are of its kind, one in ten or more. What Celery and the
#: interpreter keep for later is less, and not more each time.
SLACK = 40
#: What is in all dicts, lists, sets and deques together: a leak of strings is in one of them, for most runs.
ITEMS = 300
#: sqlite3 clears its references to cursors away after every 200 cursors of a connection, the task's and the store's.
REFERENCES = 2 * 200 + SLACK
#: Connections are opened when a thread needs one, and kept.
FILES = 8

ATOMIC = {
    **dict.fromkeys(range(6), "pays"),
    6: "again",
    7: "fails",
    8: "retries",
    9: "stages",
}
LEASE = {
    **dict.fromkeys(range(5), "works"),
    5: "again",
    6: "steps",
    7: "fails",
    8: "retries",
    9: "permanent",
}


class Press:
    """A worker with one process, and calls that end in every way."""

    def __init__(self, conf: dict[str, Any], queue: str) -> None:
        self.client = Celery("press", set_as_current=False)
        self.client.conf.update(conf)
        self.queue = queue
        self.sent = self.ends = 0

    def send(self, task: str, hows: dict[int, str], until: int) -> None:
        """Call the task until there were so many calls; return when each has ended."""
        first = self.sent
        with self.client.producer_pool.acquire() as producer:
            for n in range(first, until):
                how, key = hows[n % 10], f"{n}"
                call = (f"{n - 1}", hows[n % 10 - 1]) if how == "again" else (key, how)
                self.client.send_task(
                    task, call, producer=producer, queue=self.queue, ignore_result=True
                )
                self.ends += 2 if how == "stages" else 1
        self.sent = until
        wait_for(
            lambda: self.ask("ended") == self.ends,
            PATIENCE,
            lambda: f"{self.ends} ends, not {self.ask('ended')}",
            interval=0.2,
        )

    def ask(self, what: str) -> Any:
        return self.client.send_task(what, queue=self.queue).get(timeout=PATIENCE)


@pytest.fixture
def open_press(
    start_worker: Callable[..., Worker], databases: Iterator[str], namespace: str
) -> Iterator[Callable[..., Press]]:
    """A function that starts a worker with a store."""
    opened = []
    url = next(databases)

    def open_(store: str, database: dict[str, Any], **conf: Any) -> Press:
        conf |= {
            "broker_url": url,
            "result_backend": url,
            "idempotency_store": store or url,
            "idempotency_sweep_interval": None,
            "task_default_queue": namespace,
            "task_ignore_result": True,
        }
        press = Press(conf, namespace)
        opened.append(press)
        env = {
            "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
            "ATOMIC_DATABASES": json.dumps({"default": database}),
            "LEAK_CONF": json.dumps(conf),
            # Celery remembers the last so many ids: not more after the first look than at it.
            "CELERY_WORKER_SUCCESSFUL_MAX": "50",
        }
        start_worker("tests.sql.leak_app", env=env, queues=[namespace], pool="solo")
        return press

    yield open_
    for press in opened:
        press.client.close()


def grown(first: dict[str, Any], last: dict[str, Any]) -> dict[str, int]:
    """Return the kinds of object that have become more, by more than the slack."""
    more = Counter(last["kinds"])
    more.subtract(first["kinds"])
    slack = {"weakref.ReferenceType": REFERENCES}
    return {kind: count for kind, count in more.items() if count > slack.get(kind, SLACK)}


def compare(first: dict[str, Any], last: dict[str, Any]) -> None:
    assert grown(first, last) == {}
    assert last["items"] - first["items"] < ITEMS
    assert last["threads"] == first["threads"]
    assert last["files"] - first["files"] < FILES
    assert (first["kept alive"], last["kept alive"]) == (0, 0)


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
def test_atomic_runs_leave_nothing_behind(open_press, use_database, make_table, vendor):
    """Committed, rolled back, retried, answered again, with a message in the outbox."""
    alias = use_database(vendor)
    make_table(alias, "effects", "name varchar(200)")
    from django.db import connections

    database = dict(connections.databases[alias])
    connections[alias].close()
    if vendor == "postgresql":
        database["OPTIONS"] = {**database.get("OPTIONS", {}), "application_name": "press"}
    press = open_press("django://", database, with_atomic=True)

    def look() -> dict[str, Any]:
        found: dict[str, Any] = press.ask("census")
        if vendor == "postgresql":
            found["sessions"] = databases.rows(
                alias,
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'press'",
            )
            locks = databases.rows(
                alias,
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database ="
                " (SELECT oid FROM pg_database WHERE datname = current_database())",
            )
            assert locks == [(0,)]
        return found

    press.send("atomic", ATOMIC, FIRST)
    first = look()
    press.send("atomic", ATOMIC, LAST)
    last = look()
    compare(first, last)
    if vendor == "postgresql":
        # The thread's own, and the two that the store keeps.
        assert first["sessions"] <= last["sessions"] <= [(3,)]
    assert last["told"]["replayed"] >= LAST // 10
    # Committed: all but the failures and the repeated calls.
    assert databases.rows(alias, "SELECT count(*) FROM effects") == [(LAST * 8 // 10,)]
    unfinished = "SELECT count(*) FROM celery_idempotent_record WHERE state IN ('Q', 'P', 'I')"
    assert databases.rows(alias, unfinished) == [(0,)]
    assert databases.rows(alias, "SELECT count(*) FROM celery_idempotent_outbox") == [(0,)]


def test_runs_on_redis_leave_nothing_behind(open_press, use_database):
    """With steps, failures of both kinds, retries and replays."""
    from django.db import connections

    database = connections.databases[use_database("sqlite")]
    press = open_press("", database)
    press.send("lease", LEASE, FIRST)
    first = press.ask("census")
    press.send("lease", LEASE, LAST)
    last = press.ask("census")
    compare(first, last)
    assert last["told"]["replayed"] >= LAST // 10
