"""Scenarios of the guide's chapter on tasks: retries, and ends that are not failures."""

from __future__ import annotations

import pytest
from celery import chain, chord
from celery.exceptions import MaxRetriesExceededError, Retry

from tests.documented.scenario import scenario
from tests.documented.sides import Stage


@scenario("a retry is a new message under the same task id, and the result is the last run's")
def retry(s: Stage) -> None:
    result = s.retries.delay(2, "", "x")
    assert s.get(result) == [2, "x"]
    assert [seen[0] for seen in s.seen(result.id, "retries")] == [0, 1, 2]


@scenario("a task that retries too often fails with MaxRetriesExceededError")
def max_retries(s: Stage) -> None:
    assert isinstance(s.error(s.retries_never.delay(1)), MaxRetriesExceededError)
    result = s.retries.apply_async((9,), link_error=s.new.s())
    assert isinstance(s.error(result), MaxRetriesExceededError)
    assert len(s.seen(result.id, "retries")) == 4


@scenario("the exception that was given is raised when retries are over")
def retry_given(s: Stage) -> None:
    error = s.error(s.retries.delay(9, "given exc"))
    assert (type(error).__name__, error.args) == ("HttpError", (503, "busy"))


@scenario("a retry may come after a delay, at a moment, or without a limit")
def retry_when(s: Stage) -> None:
    assert s.get(s.retries.delay(1, "countdown")) == [1, None]
    assert s.get(s.retries.delay(1, "eta")) == [1, None]
    assert s.get(s.retries_for_ever.delay(5)) == [5, None]


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


@scenario("while it waits for its next run a task is in state RETRY, with the exception")
def retry_state(s: Stage) -> None:
    result = s.retries.apply_async((1, "exc"), retry=True)
    assert s.get(result) == [1, None]
    s.wait(lambda: "retry" in s.kinds(result.id))


@scenario("retry outside of a task's run raises the exception, or says that it cannot be")
def retry_direct(s: Stage) -> None:
    with pytest.raises(KeyError):
        s.retries(1, "exc")
    with pytest.raises(Retry) as caught:
        s.retries.retry()
    s.note("raised", caught.value)


@scenario("autoretry_for retries its exceptions, and no others")
def autoretry(s: Stage) -> None:
    assert s.get(s.autoretries.delay("key", 1)) == 1
    assert isinstance(s.error(s.autoretries.delay("key")), KeyError)
    other = s.autoretries.delay("value")
    assert isinstance(s.error(other), ValueError)
    assert len(s.seen(other.id, "run")) == 1


@scenario(
    "retry_backoff delays each retry longer, up to a limit, with or without jitter", slow=True
)
def backoff(s: Stage) -> None:
    start = s.elapsed()
    assert s.get(s.backs_off.delay("key", 2)) == 2
    assert s.elapsed() - start >= 1.9
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


@scenario("Reject(requeue=True) is too late where a task acknowledges early")
def requeue_early(s: Stage) -> None:
    result = s.ends_early.delay("requeue")
    s.wait(lambda: "postrun" in s.kinds(result.id))
    assert s.note("state", result.state) == "PENDING"
