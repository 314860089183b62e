"""What ``explain`` tells of thirty histories that real workers and operators made: the facts that decide are in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from celery_idempotent import get_store
from celery_idempotent.records import Identity, Record, State
from tests.cli import histories_app
from tests.cli.histories import History, check, write
from tests.cli.running import Ran, run_idempotency
from tests.support import sites
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.wide, pytest.mark.redis, pytest.mark.worker]


HISTORIES = [
    History(1, "It ran once and succeeded.", ("is COMPLETED", "task t-01", "Kept until")),
    History(
        2,
        "Its first run asked for a retry; the retry succeeded.",
        ("is COMPLETED", "t-02", "Not kept here: earlier runs"),
    ),
    History(3, "Its run failed for good with CardDeclined.", ("is FAILED", "CardDeclined", "t-03")),
    History(
        4, "It runs now, for the first time.", ("is PROCESSING", "t-04", "at work", "lease ends")
    ),
    History(
        5,
        "It was called, reserved its key, and waits in a queue to which no worker listens.",
        ("is QUEUED", "under task", "no worker has it yet", "deadline is"),
    ),
    History(
        6,
        "Its worker was killed while it ran; its lease ran out, and no sweep came yet.",
        ("is stuck PROCESSING", "t-06", "INTERRUPTED"),
    ),
    History(
        7,
        "Its worker was killed while it ran; a sweep interrupted it. It was not run again.",
        (
            "is INTERRUPTED",
            "t-07",
            "worker was lost",
            "waits for the broker",
            "Kept for 1 d",
            "look there first",
        ),
    ),
    History(
        8,
        "Its worker was killed while it ran; its message was delivered again, and that run succeeded.",
        ("is COMPLETED", "Claimed twice", "lost once", "may have done again"),
    ),
    History(
        9,
        "Each of its four runs killed its worker process; the fifth delivery gave up and failed it.",
        ("is FAILED", "TooManyCrashes", "lost 4 times", "without another run", "more than 3"),
    ),
    History(
        10,
        "Its worker was killed while it ran. No sweep came yet; the next one sends its message again.",
        ("is stuck PROCESSING", "publishes its message again", "requeue"),
    ),
    History(
        11,
        "Its worker was killed while it ran; a sweep sent its message again, which no worker has taken.",
        ("is QUEUED again", "lost once", "by a sweep or an operator", "t-11", "look there first"),
    ),
    History(
        12,
        "It runs; a second call (t-12b) was refused and tries again later.",
        ("is PROCESSING", "t-12b", "another call held the key, and it went back to the queue"),
    ),
    History(
        13,
        "It ran once and succeeded; a second call (t-13b) got the result without a run.",
        ("is COMPLETED", "by task t-13", "gets its result", "Not kept"),
    ),
    History(
        14,
        "It ran once and succeeded; a second call (t-14b) with another amount was refused for good.",
        ("is COMPLETED", "t-14b", "FingerprintMismatch"),
    ),
    History(
        15,
        "It did its step pay; then its worker was killed, and a sweep interrupted it.",
        ("is INTERRUPTED", "not repeated: pay", "done again as well: pay"),
    ),
    History(
        16,
        "Its worker was killed while it ran; then alice released it. It was not run again.",
        ("no record", "An operator released"),
    ),
    History(
        17,
        "Its worker was killed while it ran; then alice failed it: refunded by hand.",
        ("is FAILED for good: alice failed it", "had not settled it", "refunded by hand"),
    ),
    History(
        18,
        "Its worker was killed while it ran; then alice completed it with a value: the bank has it.",
        ("is COMPLETED: alice completed it", "the bank has it", "gets that value"),
    ),
    History(
        20,
        "Its worker was killed while it ran; alice had its message sent again, which no worker has taken.",
        ("is QUEUED again", "by a sweep or an operator", "the log says", "t-20"),
    ),
    History(
        21,
        "It runs; a second call (t-21b) waits for it, up to ten seconds.",
        ("is PROCESSING", "t-21b", "it was to wait"),
    ),
    History(
        22,
        "It runs; a second call (t-22b) failed with InProgress.",
        ("is PROCESSING", "t-22b", "it failed with InProgress"),
    ),
    History(23, "It ran once, for the scope acme, and succeeded.", ("in scope acme", "COMPLETED")),
    History(24, "It was never called.", ("There is no record", "never called")),
    History(
        25,
        "It ran once and succeeded; its retention of one second is over.",
        ("There is no record", "retention (now 1 s)"),
    ),
    History(
        26,
        "It ran once and succeeded; then alice forgot it.",
        ("There is no record", "operator", "The log"),
    ),
    History(27, "Its run failed with an error, and no retry.", ("no record", "Its run failed")),
    History(
        28,
        "Its run left it to another task (self.replace), which took over the id t-28.",
        ("is COMPLETED", "another task (self.replace)", "that other task's result"),
    ),
    History(
        29,
        "It ran once and succeeded; its result was too large for the record.",
        ("is COMPLETED", "too large", "result backend"),
    ),
    History(
        30,
        "It runs; a second call (t-30b) was dropped.",
        ("is PROCESSING", "t-30b", "it was dropped"),
    ),
    History(
        31,
        "Its worker was killed while it ran; a sweep failed it, as its task wants.",
        ("is FAILED", "ProcessingTimedOut", "lost once", "without another run"),
    ),
    History(
        32,
        "Its worker was killed while it ran; a sweep interrupted it; delivered again, it runs now.",
        ("is PROCESSING", "Claimed twice", "lost once"),
    ),
]

#: What the first worker was about when it was killed, with the task that has the policy.
_KILLED = {
    **dict.fromkeys((6, 7, 8, 16, 17, 18, 32), "charge"),
    **dict.fromkeys((10, 11, 20), "ship"),
    15: "charge",
    31: "refund",
}
_NOW = {4: "charge", 12: "charge", 21: "invoice", 22: "book", 30: "stamp"}
_ALICE = ("--who", "alice", "--yes", "--reason")


class Site(sites.Site):
    """A shop: its queue, its workers, and the command line of its app."""

    module: ClassVar[Any] = histories_app
    moods: Path
    told: dict[int, str]

    def run(self, *words: str, code: int = 0) -> Ran:
        env = histories_app.environment(self.settings)
        done = run_idempotency(histories_app.__name__, env, *words)
        assert done.code == code, done.text
        return done

    def shop_worker(self, **options: Any) -> Worker:
        return self.worker(env={histories_app.MOODS: str(self.moods)}, **options)

    def call(self, number: int, task: str, *args: Any, mood: str = "", **options: Any) -> str:
        """Publish order ``number``, whose run does as its mood says; return the task's id."""
        if mood:
            (self.moods / order(number)).write_text(mood)
        options = {"task_id": f"t-{number:02}", **options}
        return str(self.publish(f"shop.{task}", order(number), *args, **options).id)

    def record(self, number: int, task: str, scope: str = "") -> Record | None:
        about = Identity(namespace=f"shop.{task}", scope=scope, key=order(number))
        return get_store(self.app).get(about)

    def reaches(self, number: int, task: str, state: State, scope: str = "") -> Record:
        """Wait until an order is in this state."""

        def found() -> Record | None:
            record = self.record(number, task, scope)
            return record if record is not None and record.state is state else None

        record = wait_for(found, 30, lambda: f"{order(number)} {state}: {found()}")
        assert record is not None
        return record

    def on(self, number: int, verb: str, task: str, *words: str, code: int = 0) -> str:
        words = (verb, order(number), "--task", f"shop.{task}", *words)
        return self.run(*words, code=code).text

    def explain(self, number: int, task: str, *words: str, code: int = 0) -> None:
        self.told[number] = self.on(number, "explain", task, *words, code=code)


def order(number: int) -> str:
    return f"order-{number:02}"


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, str]]:
    """The words of ``explain``, by the history's number."""
    with sites.share(
        Site,
        request,
        tmp_path_factory,
        "redis",
        worker_enable_remote_control=False,
        idempotency_lease=3,
    ) as site:
        site.moods, site.told = tmp_path_factory.mktemp("moods"), {}
        copies = _lose_a_worker(site)
        _act_on_what_is_left(site)
        workers = [
            site.shop_worker(pool="threads", concurrency=12),
            site.shop_worker(queues=["crash"]),
        ]
        try:
            _come_back(site, copies)
            _run_to_their_ends(site)
            _refuse_some(site)
            _lose_some(site)
        finally:
            for mood in site.moods.iterdir():
                mood.unlink()
        for worker in workers:
            worker.stop()
        write(site.told)
        yield site.told


def _lose_a_worker(site: Site) -> list[sites.Message]:
    """Kill a worker that has begun many orders; return the messages of two of them, as a broker delivers them again."""
    worker = site.shop_worker(pool="threads", concurrency=len(_KILLED))
    copies = []
    for number, task in _KILLED.items():
        mood = "pay, then hold" if number == 15 else "hold"
        if number in (8, 32):
            (site.moods / order(number)).write_text(mood)
            copies.append(site.message("shop.charge", order(number), task_id=f"t-{number:02}"))
            site.deliver(copies[-1])
        else:
            site.call(number, task, mood=mood)
    for number, task in _KILLED.items():
        site.reaches(number, task, State.PROCESSING)

    def paid() -> bool:
        record = site.record(15, "charge")
        return record is not None and bool(record.steps)

    wait_for(paid, 30, "a step")
    worker.kill()
    return copies


def _act_on_what_is_left(site: Site) -> None:
    """See the orders before a sweep and after it; between, alice acts on some."""
    store = get_store(site.app)

    def stale() -> bool:
        records = [site.record(*each) for each in _KILLED.items()]
        return all(each is not None and each.stale(store.now_ms()) for each in records)

    wait_for(stale, 30, "the end of all leases")
    site.explain(6, "charge")
    site.explain(10, "ship")
    site.on(16, "release", "charge", *_ALICE, "the worker is gone")
    site.explain(16, "charge", code=1)
    site.on(17, "fail", "charge", *_ALICE, "refunded by hand")
    site.explain(17, "charge")
    value = ("--value", '{"charge": "ch_18"}')
    site.on(18, "complete", "charge", *value, *_ALICE, "the bank has it")
    site.explain(18, "charge")
    site.on(20, "requeue", "ship", *_ALICE, "the parcel is still here")
    site.explain(20, "ship")
    site.run("sweep")
    for number, task in {7: "charge", 11: "ship", 15: "charge", 31: "refund"}.items():
        site.explain(number, task)


def _come_back(site: Site, copies: list[sites.Message]) -> None:
    """Deliver two lost orders again: one ends, one is at work."""
    (site.moods / order(8)).unlink()
    for copy in copies:
        site.deliver(copy)
    site.reaches(8, "charge", State.COMPLETED)
    site.reaches(32, "charge", State.PROCESSING)
    site.explain(8, "charge")
    site.explain(32, "charge")


def _run_to_their_ends(site: Site) -> None:
    site.call(9, "charge", mood="die", queue="crash")
    site.call(1, "charge")
    site.call(2, "charge", mood="retry")
    site.call(3, "charge", mood="decline")
    site.call(5, "remind", queue="nobody", task_id=None)
    site.call(23, "charge", idempotency_scope="acme")
    site.call(28, "charge", mood="replace")
    site.call(29, "print")
    for number, task in {1: "charge", 2: "charge", 28: "charge", 29: "print"}.items():
        site.reaches(number, task, State.COMPLETED)
        site.explain(number, task)
    site.reaches(23, "charge", State.COMPLETED, "acme")
    site.explain(23, "charge", "--scope", "acme")
    site.reaches(3, "charge", State.FAILED)
    site.explain(3, "charge")
    site.explain(5, "remind")
    site.reaches(9, "charge", State.FAILED)
    site.explain(9, "charge")


def _refuse_some(site: Site) -> None:

    def refused(number: int, task: str) -> bool:
        record = site.record(number, task)
        return record is not None and bool(record.refusals)

    for number, task in _NOW.items():
        site.call(number, task, mood="hold")
        site.reaches(number, task, State.PROCESSING)
        if number != 4:
            site.call(number, task, task_id=f"t-{number}b")
            wait_for(partial(refused, number, task), 30, "a refusal")
        site.explain(number, task)
    for number, amount in ((13, 100), (14, 200)):
        site.call(number, "charge")
        site.reaches(number, "charge", State.COMPLETED)
        duplicate = site.call(number, "charge", amount, task_id=f"t-{number}b")
        wait_for(site.result(duplicate).ready, 30, "an answer")
        site.explain(number, "charge")


def _lose_some(site: Site) -> None:
    """See what is told of orders that have no record, whatever the reason."""
    site.explain(24, "charge", code=1)
    for number, task in {25: "greet", 26: "charge"}.items():
        site.call(number, task)
        wait_for(site.result(f"t-{number}").ready, 30, "an end")
    site.on(26, "forget", "charge", *_ALICE, "the customer wants it again")
    site.explain(26, "charge", code=1)
    site.call(27, "charge", mood="fail")
    wait_for(site.result("t-27").ready, 30, "a failure")
    wait_for(lambda: site.record(27, "charge") is None, 30, "a release")
    site.explain(27, "charge", code=1)
    wait_for(lambda: site.record(25, "greet") is None, 30, "the end of a retention")
    site.explain(25, "greet", code=1)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda each: str(each.number))
def test_explain_tells_the_facts_that_decide(told, history):
    check(history, told)
