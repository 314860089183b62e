"""Atomic tasks on real workers: killed, frozen, cut off anywhere, their writes and their record agree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Identity, State
from tests.sql import databases
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.tiers import examples
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.rabbitmq, pytest.mark.redis]

PATIENCE = 60


class Till:
    """One database, one broker, and workers that write to the first what they are told by the second."""

    def __init__(
        self, start_worker: Callable[..., Worker], ledger: Ledger, alias: str, conf: dict[str, Any]
    ) -> None:
        self.ledger, self.alias, self.conf = ledger, alias, conf
        self.queue: str = conf["task_default_queue"]
        self._start_worker = start_worker
        self.client = Celery("till", set_as_current=False)
        self.client.conf.update(self.conf)
        self.store = DjangoStore(alias)
        self.workers: list[Worker] = []

    def worker(
        self, name: str, *, database: dict[str, Any] | None = None, queue: str = "", **options: Any
    ) -> Worker:
        from django.db import connections

        settings = {**connections.databases[self.alias], **(database or {})}
        env = {
            "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
            "ATOMIC_DATABASES": json.dumps({"default": settings}),
            "ATOMIC_CONF": json.dumps({**self.conf, **options.pop("conf", {})}),
        }
        worker = self._start_worker(
            "tests.sql.atomic_app", name=name, env=env, queues=[queue or self.queue], **options
        )
        self.workers.append(worker)
        return worker

    def said_about(self, task_id: str) -> str:
        """What the logs say about a task, and how a process died that it may have been given to."""
        words = (task_id, "exited with", "inqueue", "worker lost")
        lines = [line for each in self.workers for line in each.log.splitlines()]
        return "\n".join(line for line in lines if any(word in line for word in words))

    def plan(self, kind: str, key: str, what: object = "") -> Path:
        path = self.ledger.path.parent / f"{kind}-{key}"
        path.write_text(str(what))
        return path

    def pay(
        self, key: str, *, queue: str = "", task: str = "pay", **kwargs: Any
    ) -> AsyncResult[Any]:
        return self.client.send_task(task, (key,), kwargs, queue=queue or self.queue)

    def ask(self, name: str, *args: Any) -> AsyncResult[Any]:
        return self.client.send_task(name, args)

    def effects(self, key: str) -> int:
        found = dict(
            databases.rows(  # in one statement: a payment may be committed at any moment
                self.alias,
                "SELECT name, count(*) FROM effects WHERE name IN (%s, %s) GROUP BY name",
                (key, f"{key} again"),
            )
        )
        first, second = found.get(key, 0), found.get(f"{key} again", 0)
        assert first == second, "half a transaction"
        return int(first)

    def end_session(self) -> int:
        """End a session of the workers'; return how many there were to end."""
        found = databases.rows(
            self.alias,
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1",
        )
        for row in found:
            databases.execute(self.alias, "SELECT pg_terminate_backend(%s)", row)
        return len(found)

    def record(self, key: str, task: str = "pay") -> Any:
        return self.store.get(Identity(namespace=task, key=key))

    def agree(self, key: str, result: AsyncResult[Any], task: str = "pay") -> None:
        """One effect, one record, one follow-up, one answer, whoever asks."""

        def follow_ups() -> list[int]:
            return [self.ledger.count("followed", name) for name in (key, f"{key} again")]

        def followed() -> bool:
            if not all(follow_ups()):
                self.ask("celery_idempotent.sweep")  # as beat does
            return all(follow_ups())

        wait_for(
            lambda: self.effects(key) > 0,
            PATIENCE,
            lambda: f"{key} to be paid:\n{self.said_about(result.id)}",
        )
        wait_for(followed, PATIENCE, f"what follows {key}", interval=0.5)
        assert result.get(timeout=PATIENCE) == f"paid {key}"
        assert self.effects(key) == 1, key
        assert self.record(key, task).state is State.COMPLETED
        assert self.pay(key, task=task).get(timeout=PATIENCE) == f"paid {key}"
        assert self.effects(key) == 1, key
        assert follow_ups() == [1, 1]


@pytest.fixture
def till(
    use_database: Callable[..., str],
    make_table: Callable[..., None],
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    redis_url: str,
    prefix: str,
) -> Iterator[Callable[..., Till]]:
    made: list[Till] = []

    def make(vendor: str) -> Till:
        alias = use_database(vendor)
        make_table(alias, "effects", "name varchar(200), token bigint")
        make_table(alias, "accounts", "name varchar(200) PRIMARY KEY, balance bigint")
        conf = {
            "broker_url": rabbitmq_url,
            "result_backend": redis_url,
            "result_backend_transport_options": {"global_keyprefix": prefix},
            "idempotency_store": "django://",
            "idempotency_lease": 5,
            "idempotency_max_crashes": 100,
            "task_default_queue": rabbitmq_queue,
        }
        till = Till(start_worker, ledger, alias, conf)
        made.append(till)
        return till

    yield make
    for till in made:
        till.client.close()
        till.store.close()


@pytest.mark.parametrize(
    ("vendor", "task"),
    [
        ("postgresql", "pay"),
        pytest.param("mariadb", "pay", marks=pytest.mark.wide),
        pytest.param("sqlite", "pay", marks=pytest.mark.wide),
        ("postgresql", "hand_over"),
    ],
)
def test_a_kill_at_every_boundary_leaves_effect_record_and_message_agreeing(till, vendor, task):
    """``hand_over`` is replaced by another task, whose message is part of the same transaction."""
    place = till(vendor)
    place.worker("worker", concurrency=2)
    place.agree("whole", place.pay("whole", task=task), task)

    def most() -> int:
        """Of the run and of its duplicate, which has few and may end first."""
        counts = [each.key.split()[1] for each in place.ledger.entries("boundaries")]
        return max(map(int, counts), default=0)

    wait_for(lambda: most() >= 8, PATIENCE, "claim, begin, body, settle, commit, ack")
    count = most()
    keys = [f"killed at {n}" for n in range(count)]
    for n, key in enumerate(keys):
        place.plan("kill", key, n)
    results = {key: place.pay(key, task=task) for key in keys}
    for key, result in results.items():
        place.agree(key, result, task)
    struck = [key for key in keys if (place.ledger.path.parent / f"killed-{key}").exists()]
    # The first run of a process has a few more, to get to know the database.
    assert len(struck) > count / 2, "the kills did not happen"


def test_behind_a_pooler_in_transaction_mode_too(till, rabbitmq, open_pooler):
    """A worker freezes past its lease, with a row locked: the pooler ends the session of its transaction."""
    place = till("postgresql")
    place.conf["idempotency_lease"] = 1
    pooled = {"database": open_pooler(place.alias, default_pool_size=4)}
    databases.execute(place.alias, "INSERT INTO accounts VALUES ('alice', 100)")
    queue = rabbitmq.queue()
    try:
        frozen = place.worker("frozen", queue=queue, **pooled)
        hold = place.plan("hold", "order")
        first = place.pay("order", queue=queue, account="alice")
        wait_for(lambda: place.ledger.count("inside", "order") == 1, PATIENCE, "the payment")
        frozen.freeze()
        hold.unlink()
        place.worker("second", **pooled)
        assert place.pay("order", account="alice").get(timeout=PATIENCE) == "paid order"
        frozen.thaw()
        assert first.get(timeout=PATIENCE) == "paid order"
        assert place.effects("order") == 1
        assert databases.rows(place.alias, "SELECT balance FROM accounts") == [(99,)]
        place.plan("kill", "another", 6)
        place.agree("another", place.pay("another"))
    finally:
        rabbitmq.delete(queue)


@pytest.mark.parametrize(
    ("vendor", "when"),
    [
        ("postgresql", "before"),
        ("mariadb", "after"),
        pytest.param("postgresql", "after", marks=pytest.mark.wide),
        pytest.param("mariadb", "before", marks=pytest.mark.wide),
    ],
)
def test_one_without_an_answer_resolves_to_what_happened(till, vendor, when):
    """The connection breaks before the COMMIT reached the server, or after, and before its answer."""
    place = till(vendor)
    from django.db import connections

    there = connections.databases[place.alias]
    with Proxy(there["HOST"], int(there["PORT"])) as proxy:
        place.worker("worker", database={"HOST": "127.0.0.1", "PORT": str(proxy.port)})
        hold = place.plan("hold", "order")
        result = place.pay("order")
        wait_for(lambda: place.ledger.count("inside", "order") == 1, PATIENCE, "the payment")
        (proxy.lose_requests if when == "before" else proxy.swallow_replies)(b"COMMIT")
        hold.unlink()
        place.agree("order", result)
        assert (proxy.lost, proxy.swallowed) == ((1, 0) if when == "before" else (0, 1))
        # What was rolled back left nothing behind, and is done again at once.
        assert place.ledger.count("inside", "order") == (2 if when == "before" else 1)


def test_sessions_that_are_ended_at_random_lose_and_double_nothing(till):
    """pg_terminate_backend, while orders are paid twice each: whoever is told of a payment, there is one."""
    place = till("postgresql")
    workers = [place.worker(f"worker{n}", concurrency=2) for n in range(2)]
    results: dict[str, list[AsyncResult[Any]]] = {}
    struck, until = 0, time.monotonic() + PATIENCE
    while struck < examples(20, 60):
        assert time.monotonic() < until, f"struck {struck} times"
        if all(result.ready() for both in results.values() for result in both):
            for key in (f"order {len(results) + n}" for n in range(30)):
                results[key] = [place.pay(key), place.pay(key)]
        struck += place.end_session()
        time.sleep(0.05)
    for key, both in results.items():
        states = []
        for result in both:
            # Not SUCCESS: the session of the body itself was ended.
            wait_for(result.ready, PATIENCE, f"{key} to end")
            states.append(result.result if result.successful() else result.state)
        done = f"paid {key}" in states
        assert place.effects(key) == done, (key, states)
        if done:
            assert place.record(key).state is State.COMPLETED
    assert all(worker.running for worker in workers)
