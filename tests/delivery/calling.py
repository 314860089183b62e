"""Scenarios of the guide's chapter on calling tasks: ways to call, links, errbacks, times, and options of a call."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import chain, group, signature
from kombu import Connection
from kombu.exceptions import EncodeError, OperationalError

from tests.delivery.scenario import scenario
from tests.delivery.sides import PATIENCE, Stage


@scenario("delay is apply_async with star arguments")
def delay(s: Stage) -> None:
    assert s.get(s.add.delay(2, y=3)) == 5
    assert s.get(s.add.apply_async((2,), {"y": 3})) == 5
    assert s.get(s.add.apply_async(kwargs={"x": 2, "y": 3})) == 5
    assert s.get(s.add.apply_async(args=[2, 3])) == 5


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


@scenario("every serializer carries arguments, and a result comes back as JSON gives it")
def serializers(s: Stage) -> None:
    for name in ("json", "pickle", "yaml", "msgpack"):
        result = s.echo.apply_async(([1, "ü", None],), {"b": {"c": 1.5}}, serializer=name)
        assert s.get(result) == [[[1, "ü", None]], {"b": {"c": 1.5}}]


@scenario("arguments that cannot be written are refused when the task is called", absent=1)
def unserializable(s: Stage) -> None:
    with pytest.raises(EncodeError) as caught:
        s.echo.delay(object())
    s.note("raised", caught.type)


@scenario("a result may be ignored by the call or by the task", since=(5, 7))
def ignore_result(s: Stage) -> None:
    ignored = s.add.apply_async((1, 2), ignore_result=True)
    assert s.note("value", ignored.get()) is None
    kept = s.works_ignored.apply_async(("x",), ignore_result=False)
    assert s.get(kept) == "x"
    by_task = s.works_ignored.delay("x")
    s.wait(lambda: "postrun" in s.kinds(by_task.id))
    s.see(by_task)
    assert by_task.state == "PENDING"


@scenario("headers of one's own reach the task")
def headers(s: Stage) -> None:
    shown = s.get(s.show.apply_async(headers={"tenant": "a", "trace": {"id": 1}}))
    assert shown["headers"] == {"tenant": "a", "trace": {"id": 1}}
    assert s.get(s.show.apply_async())["headers"] is None


@scenario("arguments are checked when the task is called")
def typing_on(s: Stage) -> None:
    for wrong in ((), (1, 2, 3)):
        with pytest.raises(TypeError) as caught:
            s.add.delay(*wrong)
        s.note("refused", str(caught.value))
    with pytest.raises(TypeError):
        s.add.apply_async((1,), {"z": 1})
    assert not s.side.ids(s.scenario)


@scenario("with typing=False arguments are checked by the worker, whose task fails")
def typing_off(s: Stage) -> None:
    assert isinstance(s.error(s.untyped.delay()), TypeError)
    assert isinstance(s.error(s.app.send_task("tests.add", (1, 2, 3))), TypeError)


@scenario("a task that sends another is its parent, unless the call says otherwise")
def spawned(s: Stage) -> None:
    for add_to_parent, children in ((True, 1), (False, 0)):
        result = s.spawns.delay(add_to_parent)
        child = s.app.AsyncResult(result.get(timeout=PATIENCE))
        assert s.get(child) == 2
        assert len(result.children or []) == children
        s.see(result)
