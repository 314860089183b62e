"""Scenarios of the guide's chapter on calling tasks: serializers, routes, results, headers, limits."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from tests.delivery.scenario import scenario
from tests.delivery.sides import PATIENCE, Stage


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


@scenario("a message goes to the queue, the exchange and the routing key that the call names")
def routing(s: Stage) -> None:
    queue = Queue(s.side.queue, Exchange(s.side.queue), routing_key=s.side.queue)
    options: list[dict[str, Any]] = [
        {"queue": s.side.queue},
        {"queue": queue},
        {"exchange": s.side.queue, "routing_key": s.side.queue},
        {"exchange": Exchange(s.side.queue), "routing_key": s.side.queue, "declare": [queue]},
    ]
    for each in options:
        assert s.get(s.show.apply_async(**each))["queue"] == s.side.queue


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
