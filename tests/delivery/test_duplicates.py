"""Every policy, late and early acks, in each situation of a duplicate: what its caller sees, and what runs.

While the first run is in progress the policy decides. A redelivery is neither dropped nor failed by any, and whatever
has ended answers equally. All cells play at once, on one worker; at last it is killed under those that prepared for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import redis
from celery import chain, chord
from celery.result import AsyncResult

from tests.delivery.driving import Stage, Steps, drive
from tests.delivery.histories_app import POLICIES
from tests.delivery.stand import Stand, open_stand
from tests.support.sites import RABBITMQ, REDIS, Message
from tests.support.waiting import wait_for
from tests.support.watch import Results, copies

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.timeout(400)]

#: The states of a duplicate that met a run, in the order of their first appearance.
SHOWS = {
    "retry": ["RETRY", "SUCCESS"],
    "wait": ["SUCCESS"],
    "ignore": ["IGNORED"],
    "raise": ["FAILURE"],
}
#: The state of what follows it in its chain, and of the body of its chord.
FOLLOWS = {"retry": "SUCCESS", "wait": "SUCCESS", "ignore": "PENDING", "raise": "FAILURE"}
ACKS = ("late", "early")


@dataclass
class Cell:
    """A policy with acks in one situation, which yields what it waits for."""

    stand: Stand
    results: Results
    situation: Callable[[Cell], Steps]
    policy: str
    acks: str
    label: str = ""
    error: BaseException | None = None
    #: When the worker may be killed, and whose messages the broker must have then, and must not have.
    is_vulnerable: Callable[[], bool] | None = None
    kept: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    #: What was seen, to be looked at again when everything is over.
    _seen: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.label = f"{self.stand.label()}/a"
        self.task: Any = self.stand.app.tasks[f"{self.policy}_{self.acks}"]
        self.stand.close_gate(self.label)

    @property
    def lets_go(self) -> bool:
        """Does the policy let go of a duplicate while the first run is at work?"""
        return self.policy in ("ignore", "raise")

    def steps(self) -> Steps:
        return self.situation(self)

    def end(self) -> None:
        self.stand.open_gate(self.label)

    def publish(self, *mood: str) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.task.apply_async((self.label, *mood))
        return result

    def count(self, phase: str, result: AsyncResult[Any] | None = None) -> int:
        """Count what a task told, or what was told of the key."""
        if result is None:
            return self.stand.ledger.count(phase, self.label)
        return self.stand.ledger.count(phase, task_id=result.id)

    def runs(self, count: int) -> Callable[[], Any]:
        return lambda: self.count("effect") >= count

    def met(self, result: AsyncResult[Any], *, same: bool = False) -> Callable[[], Any]:
        """Wait until a duplicate has met the holder of its key, as far as its policy lets others see that."""
        if self.policy == "wait":
            return lambda: self.count("begun", result) >= 1 + same
        if same:
            return lambda: self.count("conflicted", result)
        return lambda: SHOWS[self.policy][0] in self.results.of(result.id)

    def ended(self, *results: AsyncResult[Any]) -> Callable[[], Any]:
        return lambda: all(each.state in ("SUCCESS", "FAILURE", "IGNORED") for each in results)

    def shows(
        self, result: AsyncResult[Any], states: list[str], *, may_retry: bool = False
    ) -> None:
        """Hold a task to its states, now and when all is over; whether it went round may be a matter of time."""

        def look() -> None:
            stored = list(dict.fromkeys(self.results.of(result.id)))
            if may_retry and "RETRY" not in states:
                stored = [each for each in stored if each != "RETRY"]
            assert stored == states, stored

        look()
        self._seen.append(look)

    def shown_still(self) -> None:
        for look in self._seen:
            look()
        assert self.count("end") <= 1

    def value(self, result: AsyncResult[Any]) -> Any:
        """Return the value of a task that succeeded: no two runs have the same."""
        assert result.state == "SUCCESS", (result.state, result.result)
        assert result.result, "SUCCESS with nothing"
        return result.result

    def story(self) -> str:
        key = self.label.partition("/")[0]
        told = [each for each in self.stand.ledger.entries() if key in each.key]
        lines = [line for line in self.stand.lead.log.splitlines() if key in line]
        return f"{self.situation.__name__} {self.policy} {self.acks}: {told}; {lines[-12:]}"


# -- the situations ----------------------------------------------------------------------------------------------------


def while_running(cell: Cell) -> Steps:
    """Another call with the key: by itself, as the first step of a chain, and as a member of a chord."""
    first = cell.publish()
    yield cell.runs(1)
    si, after = cell.task.si(cell.label), cell.stand.app.tasks["after"].s(cell.label)
    alone, step = cell.publish(), chain(si, after).apply_async()
    body: Any = chord([si, cell.task.si(f"{cell.label}.other")], after).apply_async()
    duplicates = [alone, step.parent, body.parent.results[0]]
    for each in duplicates:
        yield cell.met(each)
    cell.end()
    yield cell.ended(first, *duplicates)
    for follower in step, body:
        yield lambda follower=follower: follower.state == FOLLOWS[cell.policy]
        shown = [] if cell.policy == "ignore" else [FOLLOWS[cell.policy]]
        cell.shows(follower, shown)
    for each in duplicates:
        cell.shows(each, SHOWS[cell.policy])
    assert cell.count("end") == cell.count("effect") == 1
    assert cell.count("after") == (0 if cell.lets_go else 2)
    value = cell.value(first)
    if not cell.lets_go:
        assert [cell.value(each) for each in duplicates] == [value] * 3
        assert step.result == value
        assert value in body.result
    if cell.policy == "raise":
        assert alone.result.task_id == first.id
    if cell.policy == "ignore":
        assert "is held by" in alone.info


def redelivered(cell: Cell) -> Steps:
    """The very message again, while it runs: it is the first step of a chain."""
    aside = cell.stand.new_queue()
    after = cell.stand.app.tasks["after"].s(cell.label)
    rest: Any = chain(cell.task.si(cell.label).set(queue=aside), after).apply_async()
    (message,) = cell.stand.take(aside, 1)
    cell.stand.deliver(message)
    yield cell.runs(1)
    cell.stand.deliver(message)
    yield cell.met(rest.parent, same=True)
    assert cell.results.of(rest.parent.id) == []
    cell.end()
    yield lambda: cell.count("replayed", rest.parent)
    yield cell.ended(rest.parent, rest)
    cell.shows(rest.parent, ["SUCCESS"])
    assert rest.result == cell.value(rest.parent)
    assert cell.count("after") == cell.count("end") == cell.count("effect") == 1


def after_completion(cell: Cell) -> Steps:
    """Another call, and the very message again, when it has run."""
    cell.end()
    message = cell.stand.message(cell.task.name, cell.label)
    first = cell.stand.deliver(message)
    yield cell.ended(first)
    second = cell.publish()
    cell.stand.deliver(message)
    yield lambda: cell.count("replayed", first) and cell.ended(second)()
    for each in first, second:
        cell.shows(each, ["SUCCESS"])
        assert cell.value(each) == cell.value(first)
        assert cell.count("conflicted", each) == 0
    assert cell.count("end") == cell.count("effect") == 1


def one_after_the_other(cell: Cell, task: str) -> Generator[Any, None, tuple[Any, Any]]:
    cell.end()
    first = cell.publish(task)
    yield cell.ended(first)
    second = cell.publish(task)
    yield cell.ended(second)
    return first, second


def after_permanent_failure(cell: Cell) -> Steps:
    first, second = yield from one_after_the_other(cell, "refused")
    cell.shows(second, ["FAILURE"])
    assert repr(second.result) == repr(first.result)
    assert cell.label in str(second.result)
    assert cell.count("effect") == 1


def after_failure(cell: Cell) -> Steps:
    """The first run failed, and gave its key back."""
    first, second = yield from one_after_the_other(cell, "fails")
    cell.shows(first, ["FAILURE"])
    cell.shows(second, ["SUCCESS"])
    assert (cell.count("effect"), cell.count("end")) == (2, 1)


def first_fails_meanwhile(cell: Cell) -> Steps:
    """It gives its key back while a duplicate is there, which runs if it was not let go of."""
    first = cell.publish("fails")
    yield cell.runs(1)
    second = cell.publish("fails")
    yield cell.met(second)
    cell.end()
    yield cell.ended(first, second)
    cell.shows(first, ["FAILURE"])
    cell.shows(second, SHOWS[cell.policy])
    assert cell.count("end") == (0 if cell.lets_go else 1)


def between_retries(cell: Cell) -> Steps:
    """The key is free until the retry is delivered: the duplicate runs, and answers that."""
    cell.end()
    aside = cell.stand.new_queue()
    first = cell.publish("retries", aside)
    yield lambda: "RETRY" in cell.results.of(first.id)
    second = cell.publish("retries", aside)
    yield cell.ended(second)
    (message,) = cell.stand.take(aside, 1)
    cell.stand.deliver(message)
    yield cell.ended(first)
    cell.shows(first, ["RETRY", "SUCCESS"])
    cell.shows(second, ["SUCCESS"])
    assert cell.value(first) == cell.value(second)
    assert (cell.count("effect"), cell.count("end")) == (2, 1)
    assert cell.count("conflicted", first) == 0


def child_lost(cell: Cell) -> Steps:
    """The process of the first is killed while a duplicate is there: one of the two runs to the end."""
    first = cell.publish()
    yield cell.runs(1)
    second = cell.publish()
    yield cell.met(second)
    cell.stand.plan("dies", "body", cell.label)
    cell.end()
    yield cell.ended(first, second)
    cell.shows(first, ["SUCCESS" if cell.acks == "late" else "FAILURE"], may_retry=True)
    cell.shows(second, SHOWS[cell.policy])
    _one_answer(cell, first, second, effects=int(cell.acks == "late" or not cell.lets_go))


def worker_killed(cell: Cell) -> Steps:
    """The whole worker is killed: with early acks a message that is in a process is lost."""
    first = cell.publish()
    yield cell.runs(1)
    second = cell.publish()
    yield cell.met(second)
    comes_back = cell.acks == "late", cell.policy == "retry" or SHOWS[cell.policy] == ["SUCCESS"]
    lost = cell.acks == "early" and cell.policy == "wait"
    cell.kept = [first.id] * comes_back[0] + [second.id] * (comes_back[1] and not lost)
    cell.done = [second.id] * cell.lets_go
    cell.is_vulnerable = partial(_is_where_it_should_be, cell, second)
    yield lambda: cell.is_vulnerable is None  # it was killed
    cell.end()
    effects = int(cell.acks == "late" or cell.policy == "retry")
    yield lambda: cell.count("end") == effects
    yield cell.ended(*[first] * comes_back[0], *[second] * (not lost))
    cell.shows(first, ["SUCCESS"] * comes_back[0], may_retry=True)
    # On Redis the visibility timeout is short, and a wait may be over before the worker is killed.
    cell.shows(second, [] if lost else SHOWS[cell.policy], may_retry=True)
    _one_answer(cell, first, second, effects=effects)


def _is_where_it_should_be(cell: Cell, second: AsyncResult[Any]) -> bool:
    """Is a duplicate that was let go of acknowledged? Was one just sent round that nothing else would bring back?

    On Redis one can look: when the worker is about to be killed.
    """
    if cell.lets_go:
        return cell.count("acked", second) > 0
    if cell.stand.broker == "redis" or (cell.policy, cell.acks) != ("retry", "early"):
        return True
    told = cell.stand.ledger.entries("conflicted", task_id=second.id)
    is_new = bool(told) and time.time() - told[-1].time < 0.6
    return is_new and cell.count("received", second) == len(told) + 1


def _one_answer(
    cell: Cell, first: AsyncResult[Any], second: AsyncResult[Any], *, effects: int
) -> None:
    assert cell.count("end") == effects
    values = [cell.value(each) for each in (first, second) if each.state == "SUCCESS"]
    assert len({*values}) == effects


def longer_than_the_visibility_timeout(cell: Cell) -> Steps:
    """On Redis the message comes again and again while it runs: one copy stays one, or two while it is sent round."""
    seen, until = [0], time.monotonic() + 5
    with redis.Redis.from_url(cell.stand.settings["broker_url"]) as broker:
        result = cell.publish()

        def watching(condition: Callable[[], Any]) -> Callable[[], Any]:
            def look() -> Any:
                seen.append(copies(broker, cell.stand.queue, result.id))
                return condition()

            return look

        yield watching(lambda: time.monotonic() > until)
        cell.end()
        yield watching(cell.ended(result))
        yield watching(lambda: seen[-1] == 0)
    cell.shows(result, ["SUCCESS"])
    assert cell.value(result)
    assert cell.count("end") == cell.count("effect") == 1
    # With early acks the broker has it for a moment only, which nobody may have seen.
    assert (cell.acks == "late") <= max(seen) <= 3
    conflicts = range(1, 21) if cell.acks == "late" else range(1)
    assert cell.count("conflicted", result) in conflicts


# -- all of them -------------------------------------------------------------------------------------------------------

SITUATIONS = [
    *(while_running, redelivered, after_completion, after_permanent_failure, after_failure),
    *(first_fails_meanwhile, between_retries, child_lost),
]
SLOW = longer_than_the_visibility_timeout


@dataclass
class Played:
    cells: dict[tuple[str, str, str], Cell]
    left_over: int


def kill_when_prepared(stand: Stand, doomed: list[Cell]) -> None:
    """Kill the worker once, when all wait for it, and the broker has what it must not lose.

    kombu takes a message from Redis and notes that it did in two steps: what a worker has just taken when it is killed
    between the two is lost, whatever the class of its task. Not here.
    """
    waiting = [each for each in doomed if each.error is None]
    if not waiting or not all(each.is_vulnerable and each.is_vulnerable() for each in waiting):
        return
    stand.lead.freeze()
    if stand.broker == "redis":
        with redis.Redis.from_url(stand.settings["broker_url"]) as client:

            def has(task_id: str) -> int:
                return copies(client, stand.queue, task_id)

            has_all = all(has(task_id) for each in waiting for task_id in each.kept)
            has_more = any(has(task_id) for each in waiting for task_id in each.done)
        if has_more or not has_all:
            stand.lead.thaw()
            return
    os.killpg(stand.lead.pid, signal.SIGKILL)  # its supervisor starts it again
    for each in waiting:
        each.is_vulnerable = None
    doomed.clear()


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    """On Redis the worker that is killed has a visibility timeout that is shorter than some of its tasks."""
    rabbitmq = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    every: list[Cell] = []
    with contextlib.ExitStack() as stack:

        def prepare(*situations: Callable[[Cell], Steps], **settings: Any) -> tuple[Stand, Any]:
            directory = tmp_path_factory.mktemp("duplicates")
            opened = open_stand(request.param, directory, rabbitmq, concurrency=24, **settings)
            results = stack.enter_context(Results((stand := stack.enter_context(opened)).redis))
            found = itertools.product(situations, POLICIES, ACKS)
            cells = [Cell(stand, results, *each) for each in found]
            every.extend(cells)
            return stand, cells

        patient = {"broker_transport_options": {"visibility_timeout": 3600}}
        healthy, cells = prepare(*SITUATIONS, longest_pause=0.5, **({} if rabbitmq else patient))
        drive(Stage(cells, at_once=6))
        left_over = healthy.left_over()
        slow = [] if rabbitmq else [SLOW]
        killed, cells = prepare(worker_killed, *slow, idempotency_lease=4)
        doomed = [each for each in cells if each.situation is worker_killed]
        kill = partial(kill_when_prepared, killed, [*doomed])
        drive(Stage(doomed, at_once=len(doomed), between=kill))
        drive(Stage([each for each in cells if each.situation is SLOW], at_once=8))
        left_over += killed.left_over()
        yield Played({(x.situation.__name__, x.policy, x.acks): x for x in every}, left_over)


ON_BOTH = pytest.mark.parametrize("played", [REDIS, RABBITMQ], indirect=True)


def cells(*situations: Callable[[Cell], Steps]) -> pytest.MarkDecorator:
    names = [each.__name__ for each in situations]
    return pytest.mark.parametrize(
        ("situation", "policy", "acks"), [*itertools.product(names, POLICIES, ACKS)]
    )


@ON_BOTH
@cells(*SITUATIONS, worker_killed)
def test_a_duplicate_shows_what_is_documented(played, situation, policy, acks):
    """What went wrong in a cell; and what it showed, looked at again now that all is over."""
    cell = played.cells[situation, policy, acks]
    if cell.error is not None:
        raise AssertionError(f"{cell.error}; {cell.story()}") from cell.error
    cell.shown_still()


@pytest.mark.parametrize("played", [REDIS], indirect=True)
@cells(SLOW)
def test_copies_stay_bounded_under_a_short_visibility_timeout(played, situation, policy, acks):
    test_a_duplicate_shows_what_is_documented(played, situation, policy, acks)


@ON_BOTH
def test_no_message_is_left_over(played):
    assert played.left_over == 0


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_message_of_an_old_publisher_is_one_in_any_protocol(shared, key, protocol):
    """Its app does not import the library: no header, so the worker finds the key."""
    task_id = str(uuid.uuid4())
    if protocol == 1:
        headers: dict[str, Any] = {}
        body: Any = {"task": "keyed", "id": task_id, "args": [key], "kwargs": {}}
    else:
        headers = {"task": "keyed", "id": task_id}
        body = [[key], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    about = {"serializer": "json", "correlation_id": task_id}
    by_hand = shared.deliver(Message(task_id, body, headers, about), times=2).get(timeout=20)
    assert shared.publish("keyed", key).get(timeout=20) == by_hand
    wait_for(lambda: shared.ledger.count("replayed", key) >= 2, 20, "two replays")
    assert shared.ledger.count("start", key) == 1
