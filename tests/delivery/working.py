"""Scenarios of the guide's chapter on tasks: retries, handlers, requests, limits, acks, states, remote control."""

from __future__ import annotations

import time
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery import chain, chord
from celery.exceptions import TaskRevokedError

from tests.delivery.scenario import scenario
from tests.delivery.sides import PATIENCE, Stage


@scenario("a retry is a new message under the same task id, and the result is the last run's")
def retry(s: Stage) -> None:
    result = s.retries.delay(2, "", "x")
    assert s.get(result) == [2, "x"]
    assert [seen[0] for seen in s.seen(result.id, "retries")] == [0, 1, 2]


@scenario("a retry may change arguments and options")
def retry_changes(s: Stage) -> None:
    assert s.get(s.retries.delay(1, "args", "x")) == [1, "changed"]
    assert s.get(s.retries.delay(1, "options")) == [1, None]


@scenario("a retry keeps callbacks, headers, priority, limits, and whether its result counts")
def retry_keeps(s: Stage) -> None:
    result = s.retries.apply_async(
        (1, "", 5),
        link=s.echo.s(),
        headers={"tenant": "a"},
        priority=4,
        time_limit=50,
        shadow="other",
    )
    assert s.get(result) == [1, 5]
    quiet = s.retries_quietly.delay(1)
    s.wait(lambda: s.kinds(quiet.id).count("postrun") == 2)
    assert s.note("state", quiet.state) == "PENDING"
    kept = s.retries_quietly.apply_async((1,), ignore_result=False)
    s.wait(lambda: s.kinds(kept.id).count("postrun") == 2)


@scenario("steps of a chain and members of a chord may retry")
def retry_canvas(s: Stage) -> None:
    result = chain(s.retries.si(1, "", 3), s.echo.s(), s.retries.si(1)).apply_async()
    assert s.get(result) == [1, None]
    joined = chord([s.retries.si(1), s.retries.si(1)], s.echo.s(), app=s.app).apply_async()
    assert s.get(joined) == [[[[1, None], [1, None]]], {}]


@scenario(
    "retry_backoff delays each retry longer, up to a limit, with or without jitter", slow=True
)
def backoff(s: Stage) -> None:
    start = time.monotonic()
    assert s.get(s.backs_off.delay("key", 2)) == 2
    assert time.monotonic() - start >= 1.9
    assert s.get(s.jitters.delay("key", 1)) == 1


@scenario("a task that raises Ignore leaves no state, unless it stored one itself")
def ignore(s: Stage) -> None:
    ignored = s.works.apply_async(("ignores",), link=s.quiet.s(), link_error=s.new.s())
    s.wait(lambda: "postrun" in s.kinds(ignored.id))
    assert s.note("state", ignored.state) == "PENDING"
    stored = s.works.delay("stores")
    assert s.state(stored, "SUCCESS") == "by hand"


@scenario("a task that raises Reject fails with the reason, late acknowledged or not")
def reject(s: Stage) -> None:
    for task in (s.works_late, s.works_early):
        result = task.apply_async(("rejects",))
        s.wait(lambda result=result: "postrun" in s.kinds(result.id))


@scenario("a task that raises Reject(requeue=True) is delivered again, where it acknowledges late")
def requeue(s: Stage) -> None:
    result = s.works_late.delay("requeues")
    assert s.get(result) == "requeues again"
    assert [seen[2] for seen in s.seen(result.id, "how")] == [False, True]


@scenario("handlers run in their order around a run")
def handlers(s: Stage) -> None:
    for how in ("works", "fails", "retries", "ignores", "rejects"):
        result = s.handled.delay(how)
        times = 2 if how == "retries" else 1
        s.wait(lambda result=result, times=times: s.kinds(result.id).count("postrun") == times)
        called = [x["what"] for x in s.side.lines[result.id] if x["kind"] == "note"]
        assert called[:2] == ["before_start", "how"]
        assert called[-1] == {"ignores": "how", "rejects": called[-1]}.get(how, "after_return")


@scenario("a handler that fails is an error of the worker")
def broken_handler(s: Stage) -> None:
    result = s.broken.delay("x")
    s.wait(lambda: "postrun" in s.kinds(result.id) or "lost" in s.kinds(result.id))
    s.wait(lambda: result.ready())
    s.see(result)


@scenario("a request class of one's own sees how its task ends", slow=True)
def request_class(s: Stage) -> None:
    good, bad = s.requested.delay("works"), s.requested.delay("fails")
    slow = s.requested.apply_async(("sleeps",), queue=s.mortal)
    assert s.get(good) == "works"
    assert isinstance(s.error(bad), ValueError)
    assert isinstance(s.error(slow), TimeLimitExceeded)
    s.wait_seen(bad.id, "on_failure")
    s.wait_seen(slow.id, "on_timeout")


@scenario("a task replaced by another, a chain, a group or a chord ends with their result")
def replace(s: Stage) -> None:
    expected = {"task": 15, "chain": 12, "chord": 13, "again": 16}
    for how, value in expected.items():
        assert s.get(s.replaced.delay(how, 5)) == value
    grouped = s.replaced.delay("group", 5)
    assert s.get(grouped) == [6, 7]
    assert isinstance(s.error(s.replaced.delay("failure", 5)), ValueError)


@scenario("a replaced step of a chain or member of a chord is replaced there")
def replace_inside(s: Stage) -> None:
    for how, value in (("task", 150), ("chain", 120)):
        assert s.get((s.replaced.s(how, 5) | s.mul.s(10)).apply_async()) == value
    # The last to end is the parent of the body: all are of one name.
    header = [s.replaced.si("chain", 1), s.replaced.si("chain", 1)]
    assert s.get(chord(header, s.tsum.s(), app=s.app).apply_async()) == 8


@scenario("a task adds members to the chord that it belongs to")
def add_to_chord(s: Stage) -> None:
    sig = chord([s.extends.s(1, False), s.extends.s(1)], s.tsum.s(), app=s.app)
    assert s.get(sig.apply_async()) == 3 * 101
    with pytest.raises(ValueError, match="not member of any chord"):
        s.extends(1)


@scenario("a soft time limit fails the task, which may catch it", slow=True)
def soft_limit(s: Stage) -> None:
    failed = s.works_softly.apply_async(("sleeps",), link_error=s.new.s())
    caught = s.works_softly.delay("catches")
    assert isinstance(s.error(failed), SoftTimeLimitExceeded)
    assert s.get(caught) == "caught"


@scenario("a hard time limit fails the task and calls its errbacks", slow=True)
def hard_limit(s: Stage) -> None:
    for task in (s.works_hard, s.works_hard_late):
        result = task.apply_async(("sleeps",), queue=s.mortal, link_error=s.new.s())
        assert isinstance(s.error(result), TimeLimitExceeded)
        s.wait(lambda result=result: "lost" in s.kinds(result.id))


@scenario(
    "an errback that is told twice of a hard time limit runs twice",
    slow=True,
    since=(5, 7),
    differs="ids-of-callbacks",
)
def hard_limit_told(s: Stage) -> None:
    result = s.works_hard.apply_async(("sleeps",), queue=s.mortal, link_error=s.old.s())
    assert isinstance(s.error(result), TimeLimitExceeded)
    s.wait(lambda: len(_errbacks(s)) == (1 if s.ours else 2))


@scenario("a task that is switched off is as Celery's, also by default", slow=True)
def switched_off(s: Stage) -> None:
    assert s.note("acknowledged", _acknowledged(s, s.works_off)) is True
    dead = s.works_off.apply_async(("dies",), queue=s.mortal)
    assert isinstance(s.error(dead), WorkerLostError)
    late = s.works_off.apply_async(("sleeps",), queue=s.mortal, time_limit=1, link_error=s.old.s())
    assert isinstance(s.error(late), TimeLimitExceeded)
    same = s.works_off.s("x")
    same.freeze()
    assert [s.get(same.apply_async()) for _ in range(2)] == ["x", "x"]
    assert len(s.wait_seen(same.id, "how", 2)) == 2


@scenario("a duplicate that meets a run at work runs, too", slow=True, differs="ignored-duplicates")
def ignored(s: Stage) -> None:
    with s.gate() as gate:
        first = s.keyed.delay(f"of-{s.side.name}", str(gate))
        s.wait_seen(first.id, "keyed")
        second = s.keyed.delay(f"of-{s.side.name}", str(gate))
        if s.ours:
            s.state(second, "IGNORED")
            assert not second.ready()
        else:
            s.wait_seen(second.id, "keyed")
    assert first.get(timeout=PATIENCE) == "done"


def _errbacks(s: Stage) -> list[str]:
    """Return the ids under which errbacks ran."""
    found = [each for each in s.side.ids(s.scenario) if s.seen(each, "errback")]
    return [each for each in found if "success" in s.kinds(each)]


@scenario("a task that says nothing acknowledges early", slow=True, differs="late-acknowledgement")
def acks_default(s: Stage) -> None:
    assert s.note("acknowledged", _acknowledged(s, s.works)) is not s.ours


def _acknowledged(s: Stage, task: Any) -> Any:
    with s.gate() as gate:
        result = task.apply_async(("waits", str(gate)))
        s.wait_seen(result.id, "how")
        replies = s.app.control.inspect([s.side.node], timeout=PATIENCE, limit=1).active()
    assert s.get(result) == "waits"
    (found,) = [each for each in replies[s.side.node] if each["id"] == result.id]
    return found["acknowledged"]


@scenario(
    "a lost worker fails a late acknowledging task that does not ask for its message", slow=True
)
def lost_late(s: Stage) -> None:
    result = s.works_lost_late.apply_async(("dies",), queue=s.mortal)
    assert isinstance(s.error(result), WorkerLostError)


@scenario("a lost worker fails a task that says nothing", slow=True, differs="late-acknowledgement")
def lost_default(s: Stage) -> None:
    result = s.works.apply_async(("dies",), queue=s.mortal)
    if s.ours:
        assert s.get(result) == "dies again"
    else:
        assert isinstance(s.error(result), WorkerLostError)


@scenario("a failure is acknowledged or, where the task says so, rejected")
def acks_on_failure(s: Stage) -> None:
    assert isinstance(s.error(s.works_unacked.delay("fails")), ValueError)
    assert isinstance(s.error(s.works_late.delay("fails")), ValueError)


@scenario("a revoked task does not run", slow=True)
def revoke(s: Stage) -> None:
    result = s.quiet.apply_async(("x",), countdown=3, link=s.old.s(), link_error=s.new.s())
    s.wait(lambda: "received" in s.kinds(result.id))
    result.revoke()
    assert isinstance(s.error(result), TaskRevokedError)
    assert s.state(result, "REVOKED")


@scenario("a running task is terminated", slow=True)
def terminate(s: Stage) -> None:
    result = s.works_early.delay("sleeps")
    s.wait_seen(result.id, "how")
    result.revoke(terminate=True)
    assert isinstance(s.error(result), TaskRevokedError)
