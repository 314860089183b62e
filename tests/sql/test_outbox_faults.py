"""Real workers, a real broker, SIGKILL: what a committed task had to say is said, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from celery import Celery

from tests.sql import databases, outbox_support
from tests.sql.conftest import Databases
from tests.sql.outbox_app import SETTINGS, TABLE, make_app
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.rabbitmq]

SetStage = Callable[..., "Stage"]


class Stage:
    """A worker, its database, and a test's own way to both."""

    def __init__(
        self, alias: str, client: Celery, ledger: Ledger, start: Callable[[], Worker]
    ) -> None:
        self.alias, self.client, self.ledger = alias, client, ledger
        self.worker = start()

    def send(self, task: str, *args: Any) -> None:
        self.client.tasks[task].apply_async(args)

    def later(self, gate: str) -> None:
        """Close a gate."""
        (self.ledger.path.parent / f"gate-{gate} later").touch()

    def open(self, gate: str) -> None:
        (self.ledger.path.parent / f"gate-{gate}").touch()

    def sweep(self) -> bool:
        self.send("celery_idempotent.sweep")
        return True

    def steps(self, story: str) -> list[int]:
        """What took effect; messages are sent in no order."""
        query = f"SELECT step FROM {TABLE} WHERE story = %s ORDER BY step"
        return [step for (step,) in databases.rows(self.alias, query, [story])]

    def happens(self, story: str, *steps: int) -> None:
        """Wait until all these took effect, each once, and nothing else, while a beat would sweep."""

        def done() -> bool:
            return len(self.steps(story)) >= len(steps) or not self.sweep()

        wait_for(
            done,
            40,
            lambda: f"{steps}, have {self.steps(story)}, ledger: {self.ledger.entries()}",
            interval=0.4,
        )
        assert self.steps(story) == list(steps)

    def runs(self, story: str, step: int) -> int:
        return self.ledger.count("run", f"{story} {step}")

    def pending(self) -> Any:
        return outbox_support.pending(self.alias)

    def is_empty(self) -> None:
        wait_for(
            lambda: not self.pending() or not self.sweep(),
            20,
            lambda: f"an empty outbox: {self.pending()}",
            interval=0.4,
        )


@pytest.fixture
def broker_proxy(rabbitmq_url: str) -> Iterator[Proxy]:
    """A breakable connection to the broker."""
    parts = urlsplit(rabbitmq_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5672) as proxy:
        yield proxy


@pytest.fixture
def set_stage(
    sql_databases: Databases,
    use_database: Callable[..., str],
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    broker_proxy: Proxy,
) -> Iterator[SetStage]:
    """Set the stage in a database of this vendor; the worker publishes through the proxy."""
    made: list[tuple[str, Celery]] = []
    parts = urlsplit(rabbitmq_url)
    login = parts.netloc.rpartition("@")[0]
    broken = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{broker_proxy.port}"))

    def make(vendor: str) -> Stage:
        alias = use_database(vendor)
        serial = {"postgresql": "bigserial", "mariadb": "serial"}[vendor]
        databases.execute(
            alias,
            f"CREATE TABLE {TABLE} (id {serial} PRIMARY KEY, story varchar(99), step integer)",
        )
        conf = {"task_default_queue": rabbitmq_queue, "idempotency_store": f"django://{alias}"}
        settings = {
            **conf,
            "databases": {"default": {}, alias: sql_databases(vendor)},
            "broker_read_url": rabbitmq_url,
            "broker_write_url": broken,
        }
        client = make_app({**conf, "broker_url": rabbitmq_url})
        made.append((alias, client))
        start = partial(
            start_worker,
            "tests.sql.outbox_app",
            env={SETTINGS: json.dumps(settings)},
            concurrency=1,
        )
        return Stage(alias, client, ledger, start)

    yield make
    for alias, client in made:
        databases.execute(alias, f"DROP TABLE {TABLE}")
        client.close()


def test_what_a_worker_that_is_killed_after_its_commit_left_is_sent_by_a_sweep(set_stage: SetStage):
    stage = set_stage("postgresql")
    stage.send("begin", "story", 0, "dies before sending")
    wait_for(lambda: stage.ledger.count("dies"), 30, "the worker to die")
    assert len(stage.pending()) == 3
    stage.happens("story", 0, 1, 2, 3)
    stage.is_empty()
    assert [stage.runs("story", step) for step in range(4)] == [1, 1, 1, 1]

    # One that dies between two messages, or between a message and its note that this was sent.
    stage.send("begin", "another", 0, "dies after sending two")
    stage.happens("another", 0, 1, 2, 3)
    stage.is_empty()
    assert [stage.runs("another", step) for step in range(4)] == [1, 1, 1, 1]
    assert stage.ledger.count("dies") == 2


@pytest.mark.parametrize("vendor", ["postgresql", pytest.param("mariadb", marks=pytest.mark.wide)])
def test_in_a_chain_of_follow_ups_whose_every_worker_is_killed_each_takes_effect_once(
    set_stage: SetStage, vendor: str
):
    stage = set_stage(vendor)
    stage.send("pass_on", "chain", 1, 4)
    stage.happens("chain", 1, 2, 3, 4)
    stage.is_empty()
    assert stage.ledger.count("dies") == 3
    assert [stage.runs("chain", step) for step in range(1, 5)] == [1] * 4
