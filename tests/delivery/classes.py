"""Scenarios of the guide's chapter on tasks: names, classes, handlers, requests, models."""

from __future__ import annotations

import pytest
from billiard.exceptions import TimeLimitExceeded

from tests.delivery.scenario import scenario
from tests.delivery.sides import Stage


@scenario("handlers run in their order around a run")
def handlers(s: Stage) -> None:
    for how in ("works", "fails", "retries", "ignores", "rejects"):
        result = s.handled.delay(how)
        times = 2 if how == "retries" else 1
        s.wait(lambda result=result, times=times: s.kinds(result.id).count("postrun") == times)
        called = [x["what"] for x in s.side.lines[result.id] if x["kind"] == "note"]
        assert called[:2] == ["before_start", "run"]
        assert called[-1] == {"ignores": "run", "rejects": called[-1]}.get(how, "after_return")


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
    from celery import chord

    # The last to end is the parent of the body: all are of one name.
    header = [s.replaced.si("chain", 1), s.replaced.si("chain", 1)]
    assert s.get(chord(header, s.tsum.s(), app=s.app).apply_async()) == 8


@scenario("a task adds members to the chord that it belongs to")
def add_to_chord(s: Stage) -> None:
    from celery import chord

    sig = chord([s.extends.s(1, False), s.extends.s(1)], s.tsum.s(), app=s.app)
    assert s.get(sig.apply_async()) == 3 * 101
    with pytest.raises(ValueError, match="not member of any chord"):
        s.extends(1)
