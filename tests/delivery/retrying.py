"""Scenarios of the guide's chapter on tasks: retries, and ends that are not failures."""

from __future__ import annotations

import time

from celery import chain, chord

from tests.delivery.scenario import scenario
from tests.delivery.sides import Stage


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
    ignored = s.ends.apply_async(("ignore",), link=s.quiet.s(), link_error=s.new.s())
    s.wait(lambda: "postrun" in s.kinds(ignored.id))
    assert s.note("state", ignored.state) == "PENDING"
    stored = s.ends.delay("ignore stored")
    assert s.state(stored, "SUCCESS") == "by hand"


@scenario("a task that raises Reject fails with the reason, late acknowledged or not")
def reject(s: Stage) -> None:
    for task in (s.ends_late, s.ends_early):
        result = task.apply_async(("reject",))
        s.wait(lambda result=result: "postrun" in s.kinds(result.id))


@scenario("a task that raises Reject(requeue=True) is delivered again, where it acknowledges late")
def requeue(s: Stage) -> None:
    result = s.ends_late.delay("requeue")
    assert s.get(result) == "received two times"
    assert [seen[0] for seen in s.seen(result.id, "redelivered")] == [False, True]
