"""Atomic tasks on real workers: killed, frozen, cut off anywhere, their writes and their record agree."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

pytest.importorskip("django")

from django.db import OperationalError

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Identity, State
from tests.sql import databases
from tests.support.ledger import Ledger
from tests.support.postgres import EmbeddedPostgres
from tests.support.proxy import Proxy
from tests.support.tiers import examples
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.rabbitmq, pytest.mark.redis]

PATIENCE = 60
ACCOUNTS = [f"account {n}" for n in range(20)]
#: Connections that Django keeps from task to task.
KEPT = {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
#: Else Celery closes them around each task, whatever Django was told.
REUSED = {"CELERY_DB_REUSE_MAX": 1_000}


class Till:
    """One database, one broker, and workers that write to the first what they are told by the second."""

    def __init__(
        self,
        *,
        start_worker: Callable[..., Worker],
        ledger: Ledger,
        alias: str,
        broker: str,
        queue: str,
        backend: str,
        prefix: str,
    ) -> None:
        self.ledger = ledger
        self.alias = alias
        self.queue = queue
        self.hybrid = f"hybrid+{backend}?prefix={prefix}"
        self._start_worker = start_worker
        self.conf: dict[str, Any] = {
            "broker_url": broker,
            "result_backend": backend,
            "result_backend_transport_options": {"global_keyprefix": prefix},
            "idempotency_store": "django://",
            "idempotency_lease": 5,
            "idempotency_max_crashes": 100,
            "task_default_queue": queue,
        }
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

    def reconnect(self) -> None:
        """Wait until the database lets us in again."""
        from django.db import Error, connections

        def answers() -> bool:
            connections[self.alias].close()
            try:
                return bool(databases.rows(self.alias, "SELECT 1"))
            except Error:
                return False

        wait_for(answers, PATIENCE, "the database", interval=0.05)

    def cut_off(self) -> bool:
        """Did the server end our session?"""
        from django.db import Error

        try:
            databases.rows(self.alias, "SELECT 1")
        except Error:
            return True
        return False

    def end_session(self) -> int:
        """End a session of the workers'; return how many there were to end."""
        if self.store.connections.own().vendor == "postgresql":
            ours = (
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1"
            )
            end = "SELECT pg_terminate_backend(%s)"
        else:
            ours = (
                "SELECT id FROM information_schema.processlist WHERE db = database()"
                " AND id <> connection_id() ORDER BY rand() LIMIT 1"
            )
            end = "KILL %s"
        found = databases.rows(self.alias, ours)
        for row in found:
            with suppress(OperationalError):  # MariaDB: it has ended by itself
                databases.execute(self.alias, end, row)
        return len(found)

    def balance(self) -> int:
        ((balance,),) = databases.rows(self.alias, "SELECT balance FROM accounts")
        return int(balance)

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
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    redis_url: str,
    prefix: str,
) -> Iterator[Callable[..., Till]]:
    made: list[Till] = []

    def make(vendor: str, *, alias: str = "", **options: Any) -> Till:
        alias = alias or use_database(vendor, **options)
        number = {
            "postgresql": "bigserial",
            "mariadb": "bigint auto_increment",
            "sqlite": "integer",
        }[vendor]
        for table in ("effects", "accounts"):
            databases.execute(alias, f"DROP TABLE IF EXISTS {table}")
        databases.execute(
            alias,
            f"CREATE TABLE effects (id {number} PRIMARY KEY, name varchar(200), token bigint)",
        )
        databases.execute(
            alias, "CREATE TABLE accounts (name varchar(200) PRIMARY KEY, balance bigint)"
        )
        till = Till(
            start_worker=start_worker,
            ledger=ledger,
            alias=alias,
            broker=rabbitmq_url,
            queue=rabbitmq_queue,
            backend=redis_url,
            prefix=prefix,
        )
        made.append(till)
        return till

    yield make
    for till in made:
        till.client.close()
        till.store.close()


class TestKills:
    @pytest.mark.parametrize(
        ("vendor", "task", "hybrid"),
        [
            ("postgresql", "pay", False),
            pytest.param("mariadb", "pay", False, marks=pytest.mark.wide),
            pytest.param("sqlite", "pay", False, marks=pytest.mark.wide),
            ("postgresql", "hand_over", False),
            pytest.param("postgresql", "pay", True, marks=pytest.mark.wide),
        ],
    )
    def test_a_kill_at_every_boundary_leaves_effect_record_and_message_agreeing(
        self, till, vendor, task, hybrid
    ):
        """``hand_over`` is replaced by another task, whose message is part of the same transaction."""
        place = till(vendor)
        if hybrid:
            place.conf["idempotency_store"] = place.hybrid
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


class TestZombies:
    def freeze(self, place: Till, queue: str, **database: Any) -> tuple[Worker, Any]:
        """A worker that is frozen inside of its transaction, past its lease, with a row locked."""
        databases.execute(place.alias, "INSERT INTO accounts VALUES ('alice', 100)")
        frozen = place.worker("frozen", queue=queue, **database)
        place.plan("hold", "order")
        result = place.pay("order", queue=queue, account="alice")
        wait_for(lambda: place.ledger.count("inside", "order") == 1, PATIENCE, "the payment")
        frozen.freeze()
        (place.ledger.path.parent / "hold-order").unlink()
        return frozen, result

    def test_behind_a_pooler_in_transaction_mode_too(self, till, rabbitmq, open_pooler):
        """The lock belongs to the transaction, and the session to the pooler until that is over."""
        place = till("postgresql")
        pooled = {"database": open_pooler(place.alias, default_pool_size=4)}
        queue = rabbitmq.queue()
        try:
            place.conf["idempotency_lease"] = 1
            frozen, first = self.freeze(place, queue, **pooled)
            place.worker("second", **pooled)
            second = place.pay("order", account="alice")
            assert second.get(timeout=PATIENCE) == "paid order"
            frozen.thaw()
            assert first.get(timeout=PATIENCE) == "paid order"
            assert (place.effects("order"), place.balance()) == (1, 99)
            place.plan("kill", "another", 6)
            place.agree("another", place.pay("another"))
        finally:
            rabbitmq.delete(queue)


class TestCommits:
    @pytest.mark.parametrize(
        ("vendor", "when"),
        [
            ("postgresql", "before"),
            ("mariadb", "after"),
            pytest.param("postgresql", "after", marks=pytest.mark.wide),
            pytest.param("mariadb", "before", marks=pytest.mark.wide),
        ],
    )
    def test_one_without_an_answer_resolves_to_what_happened(self, till, vendor, when):
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


class TestOutages:
    def test_sessions_that_are_ended_at_random_lose_and_double_nothing(self, till):
        """pg_terminate_backend, under load."""
        place = till("postgresql")

        self.pay_while_struck(place, place.end_session, times=examples(20, 60), pause=0.05)

    @pytest.fixture
    def own_server(self) -> Iterator[tuple[EmbeddedPostgres, str]]:
        """A PostgreSQL that may be struck, and the alias of its database, with our tables."""
        with EmbeddedPostgres() as server:
            there = server.environment()
            settings = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": "postgres",
                "USER": there["PGUSER"],
                "HOST": there["PGHOST"],
                "PORT": there["PGPORT"],
            }
            alias = databases.add_alias("struck", settings)
            databases.migrate(alias)
            yield server, alias
            databases.drop_alias(alias)

    @pytest.mark.wide
    def test_a_database_that_crashes_and_recovers_loses_and_doubles_nothing(self, till, own_server):
        """A process of the server is killed: it ends every session, and recovers from its log."""
        _, alias = own_server
        place = till("postgresql", alias=alias)

        def crash() -> int:
            found = databases.rows(
                alias,
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
                " AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1",
            )
            for (pid,) in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    return 0
                wait_for(place.cut_off, PATIENCE, "the end of every session")
            place.reconnect()
            return len(found)

        self.pay_while_struck(place, crash, times=4, pause=0.7)

    @pytest.mark.wide  # the one above crashes
    def test_a_database_that_is_restarted_loses_and_doubles_nothing(self, till, own_server):
        """It is stopped in the middle of payments, is away for a while, and started again: as in an upgrade.

        Workers keep their connections from task to task, which then are dead.
        """
        server, alias = own_server
        place = till("postgresql", alias=alias)
        workers = [
            place.worker(f"worker{n}", concurrency=2, database=KEPT, conf=REUSED) for n in range(2)
        ]
        results: dict[str, list[AsyncResult[Any]]] = {}
        for n in range(3):
            held = f"held {n}"
            hold = place.plan("hold", held)
            first = place.pay(held)
            for key in (f"order {n}-{m}" for m in range(15)):
                results[key] = [place.pay(key), place.pay(key)]
            wait_for(lambda key=held: place.ledger.count("inside", key), PATIENCE, "the payment")
            server.stop()
            hold.unlink()
            time.sleep(1)
            server.start()
            place.reconnect()
            place.agree(held, first)
            place.agree(held, place.pay(held))
        self.tell_the_truth(place, results)
        assert all(worker.running for worker in workers)

    def pay_while_struck(
        self, place: Till, strike: Callable[[], int], *, times: int, pause: float
    ) -> None:
        """Pay orders, twice each, until the database was struck so often while some were under way."""
        workers = [place.worker(f"worker{n}", concurrency=2) for n in range(2)]
        results: dict[str, list[AsyncResult[Any]]] = {}
        struck, until = 0, time.monotonic() + PATIENCE
        while struck < times:
            assert time.monotonic() < until, f"struck {struck} times"
            if all(result.ready() for both in results.values() for result in both):
                for key in (f"order {len(results) + n}" for n in range(30)):
                    results[key] = [place.pay(key), place.pay(key)]
            struck += strike()
            time.sleep(pause)
        self.tell_the_truth(place, results)
        assert all(worker.running for worker in workers)

    def tell_the_truth(self, place: Till, results: dict[str, list[AsyncResult[Any]]]) -> None:
        """Each order was paid once if anybody was told so, and else not at all."""
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


class TestTransfers:
    """Coins are moved between accounts, each move by two messages, while workers and sessions end at random."""

    @pytest.mark.wide
    @pytest.mark.parametrize("kind", ["postgresql", "mariadb", "sqlite", "pgbouncer", "hybrid"])
    def test_each_is_made_and_booked_once(self, till, open_pooler, kind):
        place = till(kind if kind in databases.VENDORS else "postgresql")
        place.conf["idempotency_lease"] = 2
        if kind == "hybrid":
            place.conf["idempotency_store"] = place.hybrid
        pool = {"default_pool_size": 20, "server_login_retry": 1}
        pooled = open_pooler(place.alias, **pool) if kind == "pgbouncer" else {}
        for name in ACCOUNTS:
            databases.execute(place.alias, "INSERT INTO accounts VALUES (%s, 100)", (name,))
        workers = [
            place.worker(f"worker{n}", concurrency=2, database=pooled or {"CONN_MAX_AGE": None})
            for n in range(2)
        ]
        moves = {f"move {n}": random.sample(ACCOUNTS, 2) for n in range(examples(100, 300))}
        results = [
            place.client.send_task("transfer", (key, {one: -1, other: 1}), queue=place.queue)
            for key, (one, other) in moves.items()
            for _ in range(2)
        ]
        struck = self.strike_until(place, workers, lambda: self.made(place) == 2 * len(moves))
        for result in results:
            result.get(timeout=PATIENCE)
        assert self.made(place) == 2 * len(moves)
        names = [*moves, *(f"{key} booked" for key in moves)]
        found = databases.rows(place.alias, "SELECT name FROM effects")
        assert sorted(name for (name,) in found) == sorted(names)
        balances = Counter(dict.fromkeys(ACCOUNTS, 100))
        for one, other in moves.values():
            balances.update({one: -1, other: 1})
        assert dict(databases.rows(place.alias, "SELECT name, balance FROM accounts")) == balances
        for key in moves:
            assert place.record(key, "transfer").state is State.COMPLETED
            assert place.record(key, "book").state is State.COMPLETED
        assert databases.rows(place.alias, "SELECT * FROM celery_idempotent_outbox") == []
        assert all(struck.values()), struck

    def made(self, place: Till) -> int:
        """How many lines there are of moves, and of what follows them."""
        from django.db import Error

        try:
            ((count,),) = databases.rows(place.alias, "SELECT count(*) FROM effects")
        except Error:
            place.reconnect()
            return 0
        return int(count)

    def strike_until(
        self, place: Till, workers: list[Worker], over: Callable[[], bool]
    ) -> Counter[str]:
        """Kill and freeze processes, and end sessions, until it is over; return how often."""
        weights = {"processes": 5, "workers": 1, "freezes": 5, "sessions": 5}
        if place.store.connections.own().vendor == "sqlite":
            # No other process writes while one is frozen.
            weights |= {"freezes": 1, "sessions": 0}
        struck = Counter(dict.fromkeys([each for each in weights if weights[each]], 0))
        until, frozen = time.monotonic() + 10 * PATIENCE, deque[tuple[float, int]]()
        while not over():
            assert time.monotonic() < until, struck
            (what,) = random.choices([*weights], [*weights.values()])
            worker = random.choice(workers)
            pid = random.choice(worker.children() or [0])
            if what == "sessions":
                struck[what] += place.end_session()
            elif what == "workers":
                worker.kill()
                worker.start()
                struck[what] += 1
            elif pid and what == "processes":
                worker.kill_child(pid)
                struck[what] += 1
            elif pid and len(frozen) < 2:
                worker.freeze(pid)
                frozen.append((time.monotonic() + 4, pid))  # twice its lease
                struck[what] += 1
            while frozen and frozen[0][0] < time.monotonic():
                thaw(frozen.popleft()[1])
            place.ask("celery_idempotent.sweep")  # as beat does
            time.sleep(random.uniform(0.1, 0.4))
        for _, pid in frozen:
            thaw(pid)
        return struck


def thaw(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)
