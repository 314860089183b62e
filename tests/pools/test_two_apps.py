"""Two apps with different settings in one process: neither sees the other's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_idempotent import InProgress, get_store
from tests.pools.app import gate_path
from tests.pools.two_apps import URLS_VARIABLE, make_apps
from tests.support.apps import close_app
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.redis]

NAMES = ("shop", "bank")


@dataclass
class Both:
    """Both apps as a test sees them, and the ledger of their workers."""

    apps: dict[str, Celery]
    ledger: Ledger
    workers: list[Worker]

    def send(self, name: str, task: str, key: str) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.apps[name].tasks[task].apply_async((key,))
        return result

    def end(self, result: AsyncResult[Any]) -> tuple[str, Any]:
        wait_for(
            lambda: result.state in {"SUCCESS", "FAILURE", "IGNORED"},
            30,
            lambda: "the end, is " + result.state + "".join(each.tail() for each in self.workers),
            interval=0.05,
        )
        return result.state, result.result

    def record(self, name: str, task: str, key: str) -> Any:
        found: Any = self.apps[name].tasks[task]
        return found.idempotency_record(key)


@pytest.fixture(scope="module")
def both(databases: Iterator[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = tmp_path_factory.mktemp("both")
    ledger = Ledger(directory / "ledger.jsonl")
    urls = {name: next(databases) for name in NAMES}
    env = {URLS_VARIABLE: json.dumps(urls), LEDGER_VARIABLE: str(ledger.path)}
    workers = [
        Worker(
            f"tests.pools.two_apps:{name}",
            directory=directory,
            name=name,
            pool="threads",
            concurrency=4,
            env=env,
        )
        for name in NAMES
    ]
    both = Both(make_apps(urls), ledger, workers)
    try:
        for worker in workers:
            worker.start(timeout=60)
        yield both
    finally:
        for worker in workers:
            worker.kill()
        for app in both.apps.values():
            get_store(app).close()
            close_app(app)


def test_the_same_task_with_the_same_key_runs_once_in_each(both: Both, key: str):
    for name in NAMES:
        first = both.send(name, "work", key)
        assert both.end(first) == ("SUCCESS", [name, key, first.id])
        assert both.end(both.send(name, "work", key)) == ("SUCCESS", [name, key, first.id])
        assert both.record(name, "work", key).task_id == first.id
    for name in NAMES:
        assert both.ledger.count(f"effect {name}", key) == 1


def test_each_has_its_own_policy(both: Both, key: str):
    held = {name: both.send(name, "hold", key) for name in NAMES}
    for name in NAMES:
        wait_for(lambda name=name: both.record(name, "hold", key), 20, name)  # type: ignore[misc]
    leases = {name: both.record(name, "hold", key) for name in NAMES}
    assert leases["shop"].deadline_ms - leases["shop"].updated_ms == 30_000
    assert leases["bank"].deadline_ms - leases["bank"].updated_ms == 300_000
    state, error = both.end(both.send("shop", "hold", key))
    assert state == "FAILURE"
    assert isinstance(error, InProgress)
    assert both.end(both.send("bank", "hold", key))[0] == "IGNORED"
    gate_path(both.ledger.path.parent, key).touch()
    for name, result in held.items():
        assert both.end(result) == ("SUCCESS", name)


@pytest.mark.parametrize(("name", "other"), [NAMES, NAMES[::-1]])
def test_what_one_calls_of_the_other_is_the_others(both: Both, key: str, name: str, other: str):
    relayed = both.send(name, "relay", key)
    state, said = both.end(relayed)
    assert state == "SUCCESS"
    assert said["claim"] == relayed.id
    assert said["there"][:2] == [other, f"{key} eager"]
    assert said["here"][:2] == [name, f"{key} eager"]
    sent = both.apps[other].AsyncResult(said["sent"])
    assert both.end(sent) == ("SUCCESS", [other, f"{key} sent", sent.id])
    for app, what in ((name, "eager"), (other, "eager"), (other, "sent")):
        assert both.ledger.count(f"effect {app}", f"{key} {what}") == 1
        assert both.record(app, "work", f"{key} {what}") is not None
        assert both.ledger.count(f"told {app}", f"{key} {what}") == 2  # claimed and settled
    assert both.record(name, "work", f"{key} sent") is None
    assert both.record(other, "relay", key) is None
    assert both.ledger.count(f"told {other}", key) == 0
