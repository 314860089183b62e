"""A rolling deploy that changes keys: workers and publishers of two versions at once, and messages in flight."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.cli.running import Ran, run_idempotency
from tests.support import sites
from tests.support.ledger import Ledger
from tests.support.sites import REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker
from tests.worker import renamed_app, versions_app

pytestmark = pytest.mark.worker

#: So many operations of each task; ``CELERY_IDEMPOTENT_SOAK=1000`` for more.
COUNT = 7 if int(os.environ.get("CELERY_IDEMPOTENT_SOAK", "0")) < 1000 else 200


class Site(sites.Site):
    module: ClassVar[Any] = versions_app


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    broker: str,
    ledger: Ledger,
    start_worker: Callable[..., Worker],
) -> Iterator[Site]:
    settings = {"worker_enable_remote_control": False, "longest_pause": 1}
    site = sites.open_site(Site, request, broker, ledger, start_worker, settings)
    yield site
    site.close()


def test_every_operation_takes_effect_once(site: Site, ledger: Ledger):
    """Each is published twice by either version, while workers of the first are replaced by those of the second."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    publishers = {
        version: versions_app.make_app(site.settings, version=version) for version in (1, 2)
    }
    before = site.worker(concurrency=2, wanted={"version": 1})
    operations = [
        (name, f"{name}-{n}") for name in ("finer", "moved", "scoped") for n in range(COUNT)
    ]
    calls = [(version, *each) for version in (1, 1, 2, 2) for each in operations]
    chance.shuffle(calls)
    sent: list[tuple[str, Any]] = []

    def publish(part: list[Any]) -> None:
        for version, name, order in part:
            seconds = (len(order) + int(order[-1])) % 3 * 0.1
            task = publishers[version].tasks[name]
            sent.append((order, task.apply_async((order, "sale", seconds))))

    publish(calls[: len(calls) // 2])
    after = site.worker(concurrency=2, wanted={"version": 2})
    publish(calls[len(calls) // 2 :])
    wait_for(lambda: ledger.count("end") > COUNT, 60, "half of them to be done")
    before.stop()
    answers: dict[str, set[Any]] = {}
    for order, result in sent:
        wait_for(result.ready, 60, f"{order} to be answered (seed {seed})")
        assert result.state == "SUCCESS", (order, result.result, seed)
        answers.setdefault(order, set()).add(result.result)
    assert after.running
    counts = {order: ledger.count("start", order) for _, order in operations}
    assert counts == dict.fromkeys(counts, 1), seed
    assert all(len(each) == 1 for each in answers.values()), seed
    for app in publishers.values():
        app.close()


@pytest.mark.parametrize("broker", [REDIS])
def test_a_task_that_had_no_key_runs_no_message_of_before_again(site: Site, ledger: Ledger):
    old = versions_app.make_app(site.settings, version=1)
    with old:
        before = site.worker(concurrency=1, wanted={"version": 1})
        message = old.tasks["keyed"].apply_async(("k",), task_id="fixed")
        assert message.get(timeout=30)
        before.stop()
        site.worker(concurrency=1, wanted={"version": 2})
        old.tasks["keyed"].apply_async(("k",), task_id="fixed")
        barrier = old.tasks["keyed"].apply_async(("another",))
        assert barrier.get(timeout=30)
    assert ledger.count("start", "k") == 1


class RenamedSite(sites.Site):
    module: ClassVar[Any] = renamed_app

    def check(self, version: str, lock: Path, *words: str) -> Ran:
        """Check the keys of a version as its deploy does."""
        env = renamed_app.environment(self.settings, version=version)
        words = ("check", "--keys", str(lock), "--json", *words)
        return run_idempotency(renamed_app.__name__, env, *words)


def test_a_rename_is_caught_by_the_file_of_keys_and_its_transition_runs_nothing_twice(
    request: pytest.FixtureRequest,
    ledger: Ledger,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
):
    settings = {"worker_enable_remote_control": False, "longest_pause": 1}
    site = sites.open_site(RenamedSite, request, "redis", ledger, start_worker, settings)
    lock, gate = tmp_path / "keys.lock", tmp_path / "gate"
    assert site.check("before", lock, "--write").code == 0

    caught = site.check("renamed", lock)
    assert caught.code == 1, caught.text
    assert {(each["task"], each["change"]) for each in caught.objects} == {
        ("shop.charge", "removed"),
        ("shop.pay", "added"),
    }
    assert "let shop.pay say idempotency_namespace_before='shop.charge'" in caught.text
    through = site.check("transition", lock)
    assert (through.code, through.objects) == (0, []), through.text

    new = renamed_app.make_app(site.settings, version="transition")
    before = site.worker(concurrency=1, wanted={"version": "before"})
    done = site.publish("shop.charge", "done")
    assert done.get(timeout=30)
    running = site.publish("shop.charge", "running", str(gate))
    wait_for(lambda: ledger.count("start", "running"), 30, "a run by the old version")
    waiting = site.publish("shop.charge", "waiting")
    after = site.worker(concurrency=2, wanted={"version": "transition"})
    again = {
        order: new.tasks["shop.pay"].apply_async((order, *more))
        for order, *more in (["done"], ["running", str(gate)], ["waiting"])
    }
    assert again["done"].get(timeout=30) == done.get()
    assert again["waiting"].get(timeout=30) == waiting.get(timeout=30)
    gate.touch()
    assert again["running"].get(timeout=30) == running.get(timeout=30)
    before.stop()
    assert after.running
    assert {each: ledger.count("start", each) for each in again} == dict.fromkeys(again, 1)
    new.close()
    site.close()
