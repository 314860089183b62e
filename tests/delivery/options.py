"""Scenarios of the guide's chapter on tasks: limits, acknowledgement, states, exceptions, remote control."""

from __future__ import annotations

from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery.exceptions import TaskRevokedError

from tests.delivery.scenario import scenario
from tests.delivery.sides import PATIENCE, Stage


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
        assert s.get(result) == "came back"
    else:
        assert isinstance(s.error(result), WorkerLostError)


@scenario("a failure is acknowledged or, where the task says so, rejected")
def acks_on_failure(s: Stage) -> None:
    assert isinstance(s.error(s.works_unacked.delay("value error")), ValueError)
    assert isinstance(s.error(s.works_late.delay("value error")), ValueError)


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
