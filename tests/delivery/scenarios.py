"""The situations of the matrix: what is done to a key and its duplicate, and what must have come of it."""

from __future__ import annotations

import os
import signal
import time
import uuid
from functools import partial
from typing import Any

from celery import chain, chord

from tests.delivery.cells import Cell, Scenario, first_seen
from tests.delivery.driving import Steps
from tests.support.sites import Message


def while_running(cell: Cell) -> Steps:
    """Another message with the key, while the first runs."""
    first = cell.publish()
    yield cell.runs(1)
    second = cell.publish()
    yield cell.met(second)
    cell.end()
    yield cell.ended(first, second)
    cell.shows("While the first run is at work", second)
    assert cell.effects() == cell.starts() == 1
    if not cell.dropped:
        assert cell.value(second) == cell.value(first)
    result: Any = cell.site.result(second)
    if cell.policy == "raise":
        assert result.result.task_id == first
    if cell.policy == "ignore":
        assert "is held by" in result.info
        assert cell.site.result(first).state == "SUCCESS"
    if cell.policy != "retry":
        assert cell.events(second).count("received") == 1


def redelivered_while_running(cell: Cell) -> Steps:
    """The very message again, while it runs."""
    message = cell.message()
    yield from _delivered_twice(cell, message)
    assert cell.effects() == cell.starts() == 1


def _delivered_twice(cell: Cell, message: Message) -> Steps:
    task_id = message.task_id
    cell.deliver(message)
    yield cell.runs(1)
    cell.deliver(message)
    yield cell.met(task_id, same=True)
    assert first_seen(cell.stored(task_id)) == ["STARTED"]
    cell.end()
    yield lambda: cell.saw(task_id, "succeeded", 2)
    cell.shows("The same message again, while it runs", task_id)
    assert cell.value(task_id)


def after_completion(cell: Cell) -> Steps:
    """Another message with the key, and the very message again, when it has run."""
    cell.end()
    message = cell.message()
    first = message.task_id
    cell.deliver(message)
    yield cell.ended(first)
    value = cell.value(first)
    second = cell.publish()
    cell.deliver(message)
    yield lambda: cell.ended(second)() and cell.saw(first, "succeeded", 2)
    for each in (first, second):
        cell.shows("After the first run", each)
        assert cell.value(each) == value
        assert cell.conflicts(each) == 0
    assert cell.effects() == cell.starts() == 1


def after_permanent_failure(cell: Cell) -> Steps:
    """Another message with the key, when the first failed for good."""
    cell.end()
    arguments = cell.arguments("refused")
    first = cell.publish(*arguments)
    yield cell.ended(first)
    second = cell.publish(*arguments)
    yield cell.ended(second)
    cell.shows("After a permanent failure", second)
    errors = [cell.site.result(each).result for each in (first, second)]
    assert len({(type(error).__name__, str(error)) for error in errors}) == 1
    assert "expired" in str(errors[1])
    assert cell.starts() == 1


def after_failure(cell: Cell) -> Steps:
    """Another message with the key, when the first failed and gave it back."""
    cell.end()
    arguments = cell.arguments("fails once")
    first = cell.publish(*arguments)
    yield cell.ended(first)
    assert cell.site.result(first).state == "FAILURE"
    second = cell.publish(*arguments)
    yield cell.ended(second)
    cell.shows("After any other failure", second)
    assert cell.value(second)
    assert (cell.starts(), cell.effects()) == (2, 1)


def first_fails_meanwhile(cell: Cell) -> Steps:
    """The first fails while a duplicate is there."""
    arguments = cell.arguments("fails once")
    first = cell.publish(*arguments)
    yield cell.runs(1)
    second = cell.publish(*arguments)
    yield cell.met(second)
    cell.end()
    yield cell.ended(first, second)
    cell.shows("The first run fails while the duplicate is there", second)
    assert cell.site.result(first).state == "FAILURE"
    assert cell.effects() == (0 if cell.dropped else 1)
    if not cell.dropped:
        assert cell.value(second)


def between_retries(cell: Cell) -> Steps:
    """A duplicate between a run that asks for its retry and that retry."""
    return _between("retries once", cell)


def between_autoretries(cell: Cell) -> Steps:
    """The same, where Celery retries by itself."""
    return _between("autoretries once", cell)


def _between(mood: str, cell: Cell) -> Steps:
    cell.end()
    arguments = cell.arguments(mood)
    first = cell.publish(*arguments)
    yield lambda: cell.saw(first, "retried")
    cell.copies[first] += 1
    second = cell.publish(*arguments)
    yield cell.ended(first, second)
    found = cell.shows("Between two tries of the first", second)
    assert first_seen(cell.stored(first)) == found.words["the first"]
    assert cell.value(first) == cell.value(second)
    assert (cell.starts(), cell.effects()) == (2, 1)
    assert cell.conflicts(first) == 0


def child_lost(cell: Cell) -> Steps:
    """The process of the first is killed while a duplicate is there."""
    first = cell.publish()
    yield cell.runs(1)
    second = cell.publish()
    yield cell.met(second)
    if cell.acks == "late":
        cell.copies[first] += 1  # it is given back
    (start,) = cell.site.ledger.entries("start", cell.key)
    os.kill(start.pid, signal.SIGKILL)
    if cell.acks == "late" or not cell.dropped:
        yield cell.runs(2)
    cell.end()
    yield cell.ended(first, second)
    _crashed(
        cell, "The process of the first run is lost while the duplicate is there", first, second
    )


def worker_killed(cell: Cell) -> Steps:
    """The whole worker is killed while a duplicate is there."""
    first = cell.publish()
    yield cell.runs(1)
    second = cell.publish()
    yield cell.met(second)
    cell.site.prepared.add(cell.name)
    if cell.acks == "late":
        cell.site.kept.add(first)
    if cell.policy == "retry" or (cell.policy, cell.acks) == ("wait", "late"):
        cell.site.kept.add(second)
    if (cell.policy, cell.acks) == ("retry", "early"):
        cell.site.vulnerable = partial(_on_its_way, cell, second)
    yield lambda: cell.site.killed
    heading = "The whole worker is killed while the duplicate is there"
    found = cell.documented(heading)
    cell.end()
    if found.text["runs to the end"] == "1":
        yield lambda: cell.effects()
    yield lambda: all(
        first_seen(cell.stored(each))[-1:] == words[-1:] and (len(words) == 1 or cell.ended(each)())
        for each, words in ((first, found.words["the first"]), (second, found.words["AsyncResult"]))
    )
    # On Redis the visibility timeout is short here, and a wait is over before the worker is killed.
    _crashed(cell, heading, first, second, may_retry=cell.policy == "wait")
    # A killed worker took what it had told nobody yet with it; what Redis gives back is bounded, not counted here.
    for each in (first, second):
        assert cell.events(each).count("received") <= 12 + cell.conflicts(each)
    cell.copies.clear()


def _on_its_way(cell: Cell, task_id: str) -> bool:
    """Has the duplicate just been sent round, for a second at least? With early acks nothing else survives."""
    received = cell.events(task_id).count("received")
    told = cell.site.ledger.entries("conflicted", task_id=task_id)
    return len(told) >= 2 and received == len(told) + 1 and time.time() - told[-1].time < 0.6


def _crashed(cell: Cell, heading: str, first: str, second: str, *, may_retry: bool = False) -> None:
    found = cell.shows(heading, second, may_retry=may_retry)
    # Whoever of the two is second when the key is free again may go round.
    states = first_seen(cell.stored(first), {"RETRY"})
    assert states == found.words["the first"], states
    assert cell.effects() == int(found.text["runs to the end"])
    values = {
        cell.value(each)["run"]
        for each in (first, second)
        if cell.site.result(each).state == "SUCCESS"
    }
    assert len(values) == cell.effects()


def longer_than_the_visibility_timeout(cell: Cell) -> Steps:
    """On Redis the message comes again and again while it runs."""
    yield lambda: cell.site.killed
    task_id = str(uuid.uuid4())
    with cell.site.copies(task_id) as copies:
        cell.task.apply_async(cell.arguments(seconds=5, gate=""), task_id=task_id)
        yield cell.ended(task_id)
        yield lambda: copies.now() == 0
    assert first_seen(cell.stored(task_id)) == ["STARTED", "SUCCESS"]
    assert cell.value(task_id)
    assert cell.effects() == cell.starts() == 1
    # One copy stays one, or two while it is sent round, or given back while it is.
    # (With early acks the broker has it for a moment only, which nobody may have seen.)
    assert (cell.acks == "late") <= copies.most <= 3
    if cell.acks == "late":
        assert 1 <= cell.conflicts(task_id) <= 20
    else:
        assert cell.conflicts(task_id) == 0


# -- canvas ------------------------------------------------------------------------------------------------------------


def in_a_chain(cell: Cell) -> Steps:
    """A duplicate that is the first step of a chain."""
    first = cell.publish()
    yield cell.runs(1)
    rest: Any = chain(cell.task.si(*cell.arguments()), cell.after()).apply_async()
    second = rest.parent.id
    yield cell.met(second)
    cell.end()
    yield cell.ended(first, second)
    found = cell.shows("In a chain or a chord", second)
    (word,) = found.words["the rest of the chain"]
    yield lambda: rest.state == word
    assert cell.effects() == 1
    if word == "SUCCESS":
        assert rest.result == {**cell.value(first), "label": cell.key}
    assert cell.site.ledger.count("after", cell.key) == (0 if cell.dropped else 1)


def redelivered_in_a_chain(cell: Cell) -> Steps:
    """The first step of a chain again, while it runs."""
    aside = cell.site.new_queue()
    rest: Any = chain(cell.task.si(*cell.arguments()).set(queue=aside), cell.after()).apply_async()
    (message,) = cell.site.take(aside, 1)
    yield from _delivered_twice(cell, message)
    yield lambda: rest.state == "SUCCESS"
    assert rest.result == {**cell.value(message.task_id), "label": cell.key}
    assert cell.site.ledger.count("after", cell.key) == cell.effects() == 1


def in_a_chord(cell: Cell) -> Steps:
    """A duplicate that is a member of a chord."""
    first = cell.publish()
    yield cell.runs(1)
    header = [cell.task.si(*cell.arguments()), cell.other()]
    body: Any = chord(header, cell.collect()).apply_async()
    second = body.parent.results[0].id
    yield cell.met(second)
    cell.end()
    yield cell.ended(first, second)
    found = cell.shows("In a chain or a chord", second)
    word = found.words["the body of the chord"][0]
    yield lambda: body.state == word
    assert cell.effects() == 1
    if word == "SUCCESS":
        assert cell.value(first)["run"] in body.result
        assert len(body.result) == 2
    assert cell.site.ledger.count("collect", cell.key) == (0 if cell.dropped else 1)


def redelivered_in_a_chord(cell: Cell) -> Steps:
    """A member of a chord again, while it runs."""
    aside = cell.site.new_queue()
    header = [cell.task.si(*cell.arguments()).set(queue=aside), cell.other()]
    body: Any = chord(header, cell.collect()).apply_async()
    (message,) = cell.site.take(aside, 1)
    yield from _delivered_twice(cell, message)
    yield lambda: body.state == "SUCCESS"
    assert cell.value(message.task_id)["run"] in body.result
    assert len(body.result) == 2
    assert cell.site.ledger.count("collect", cell.key) == cell.effects() == 1


#: For a worker that is left alone, but for a child now and then.
HEALTHY: list[Scenario] = [
    while_running,
    redelivered_while_running,
    after_completion,
    after_permanent_failure,
    after_failure,
    first_fails_meanwhile,
    between_retries,
    between_autoretries,
    child_lost,
    in_a_chain,
    redelivered_in_a_chain,
    in_a_chord,
    redelivered_in_a_chord,
]

#: For a worker that is killed, and starts again.
KILLED: list[Scenario] = [worker_killed]

#: For Redis, and a visibility timeout that is shorter than the task.
SLOW: list[Scenario] = [longer_than_the_visibility_timeout]
