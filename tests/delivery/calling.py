"""Scenarios of the guide's chapter on calling tasks: ways to call, links, errbacks, times."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import chain, group, signature
from kombu import Connection
from kombu.exceptions import OperationalError

from tests.delivery.scenario import scenario
from tests.delivery.sides import Stage


@scenario("delay is apply_async with star arguments")
def delay(s: Stage) -> None:
    assert s.get(s.add.delay(2, y=3)) == 5
    assert s.get(s.add.apply_async((2,), {"y": 3})) == 5
    assert s.get(s.add.apply_async(kwargs={"x": 2, "y": 3})) == 5
    assert s.get(s.add.apply_async(args=[2, 3])) == 5


@scenario("a task that is called as a function runs here, and no message is sent")
def called(s: Stage) -> None:
    assert s.note("sum", s.add(2, 2)) == 4
    assert s.note("request", s.show())["direct"] is True
    with pytest.raises(ValueError, match="no luck"):
        s.fail()
    assert s.add.s(2, 2)() == 4
    assert not s.side.ids(s.scenario)


@scenario("a call may bring a task id of its own")
def own_id(s: Stage) -> None:
    result = s.add.apply_async((2, 2), task_id=f"my-own-{s.side.name}")
    assert result.id == f"my-own-{s.side.name}"
    assert s.get(result) == 4
    assert s.get(s.app.AsyncResult(result.id)) == 4


@scenario("a task is called by its name where it is not known")
def by_name(s: Stage) -> None:
    assert s.get(s.app.send_task("tests.add", (2, 2))) == 4
    assert s.get(s.app.send_task("tests.add", kwargs={"x": 1, "y": 2}, headers={"a": 1})) == 3
    assert s.get(signature("tests.add", args=(3, 4), app=s.app).delay()) == 7


@scenario("a link runs with the result of its parent, and is its child")
def link(s: Stage) -> None:
    result = s.add.apply_async((2, 2), link=s.add.s(16))
    assert s.get(result) == 4
    s.wait(lambda: result.children)
    assert s.get(result.children[0]) == 20
    s.see(result)
    assert len(s.note("collected", [value for _, value in result.collect()])) == 2


@scenario("links that are listed run in their order, with options and immutable ones as they are")
def links(s: Stage) -> None:
    listed = [s.mul.s(16), s.quiet.si("immutable"), s.add.s(1).set(priority=4, headers={"h": 1})]
    result = s.add.apply_async((2, 2), link=listed)
    assert s.get(result) == 4
    (together,) = s.wait(lambda: result.children)
    assert [s.get(child) for child in together.results] == [64, "immutable", 5]
    s.see(result)


@scenario("a link may be a chain, a group or a chord")
def link_canvas(s: Stage) -> None:
    chained = chain(s.add.s(1), s.mul.s(2))
    result = s.add.apply_async((2, 2), link=chained)
    assert s.get(result) == 4
    grouped = group([s.mul.s(1), s.mul.s(2)], app=s.app)
    other = s.add.apply_async((1, 1), link=[grouped, grouped.clone() | s.tsum.s()])
    assert s.get(other) == 2


@scenario("several errbacks run in their order, whatever their style")
def errbacks(s: Stage) -> None:
    result = s.fail.apply_async(
        link=s.quiet.s(), link_error=[s.new.s(), s.old.s(), s.new.s(), s.bound_old.s()]
    )
    s.error(result)
    assert len(s.wait_seen(result.id, "errback", 2)) == 2


@scenario("a task that expired is revoked, after seconds or at a moment")
def expires(s: Stage) -> None:
    past = datetime.now(timezone.utc) - timedelta(seconds=5)
    for options in ({"expires": past}, {"expires": -5}):
        result = s.add.apply_async((1, 1), link=s.quiet.s(), link_error=s.new.s(), **options)
        assert type(s.error(result)).__name__ == "TaskRevokedError"
        assert result.state == "REVOKED"


@scenario(
    "a broker that is away raises OperationalError, at once or when retries are over", absent=2
)
def unreachable(s: Stage) -> None:
    policies: list[dict[str, Any]] = [
        {"retry": False},
        {
            "retry": True,
            "retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0.01},
        },
    ]
    for options in policies:
        with Connection("redis://127.0.0.1:1/0") as connection:
            with pytest.raises(OperationalError) as caught:
                s.add.apply_async((1, 1), connection=connection, **options)
            s.note("raised", caught.type)
            assert caught.type is s.add.OperationalError
