"""Scenarios of the guide's chapter on calling tasks: serializers, routes, results, headers, limits."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from tests.documented.scenario import scenario
from tests.documented.sides import PATIENCE, Stage


@scenario("every serializer carries arguments, and a result comes back as JSON gives it")
def serializers(s: Stage) -> None:
    for name in ("json", "pickle", "yaml", "msgpack"):
        result = s.echo.apply_async(([1, "ü", None],), {"b": {"c": 1.5}}, serializer=name)
        assert s.get(result) == [[[1, "ü", None]], {"b": {"c": 1.5}}]


@scenario("arguments that JSON knows beyond its own arrive as they were")
def json_types(s: Stage) -> None:
    given = [datetime(2024, 2, 29, tzinfo=timezone.utc), Decimal("1.10"), uuid.UUID(int=7)]
    assert s.get(s.echo.apply_async(given)) == [given, {}]
    assert s.get(s.echo.delay((1, 2), {3: 4})) == [[[1, 2], {"3": 4}], {}]


@scenario("arguments that cannot be written are refused when the task is called", absent=1)
def unserializable(s: Stage) -> None:
    with pytest.raises(EncodeError) as caught:
        s.echo.delay(object())
    s.note("raised", caught.type)


@scenario("every compression carries a message", wide=True)
def compressions(s: Stage) -> None:
    for name in ("zlib", "gzip", "bzip2"):
        assert s.get(s.echo.apply_async(("x" * 1000,), compression=name))[0] == ["x" * 1000]


@scenario("a task's own serializer and compression are those of its messages", wide=True)
def task_transport(s: Stage) -> None:
    for name in ("works_yaml", "works_zipped"):
        assert s.get(getattr(s, name).delay("shows"))[0] is True
    assert s.get(s.works_yaml.apply_async(("shows",), serializer="json", priority=7))[1] == 7


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


@scenario("a message goes where the app's routes send its task", absent=2, wide=True)
def routes(s: Stage) -> None:
    s.elsewhere.delay()
    s.add.apply_async((1, 1), queue=f"{s.side.name}.elsewhere")
    with s.app.connection_for_read() as connection, connection.channel() as channel:
        count = channel.queue_declare(f"{s.side.name}.elsewhere", passive=True).message_count
        assert s.note("waiting", count) == 2
        channel.queue_delete(f"{s.side.name}.elsewhere")


@scenario("priorities reach the task", wide=True)
def priority(s: Stage) -> None:
    assert [s.get(s.show.apply_async(priority=n))["priority"] for n in (0, 5, 9)] == [0, 5, 9]


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


@scenario("a failure of an ignored result is kept only where the task says so", wide=True)
def ignored_errors(s: Stage) -> None:
    kept = s.works_ignored_but_errors.delay("value error")
    s.state(kept, "FAILURE")
    lost = s.works_ignored.delay("value error")
    s.wait(lambda: "postrun" in s.kinds(lost.id))
    assert s.note("state", lost.state) == "PENDING"


@scenario("headers of one's own reach the task")
def headers(s: Stage) -> None:
    shown = s.get(s.show.apply_async(headers={"tenant": "a", "trace": {"id": 1}}))
    assert shown["headers"] == {"tenant": "a", "trace": {"id": 1}}
    assert s.get(s.show.apply_async())["headers"] is None


@scenario("a shadow name stands in for the task's in events and logs", wide=True)
def shadow(s: Stage) -> None:
    assert s.get(s.show.apply_async(shadow="disguise"))["shadow"] == "disguise"


@scenario("argsrepr and kwargsrepr hide arguments in events and logs", wide=True)
def hiding(s: Stage) -> None:
    hidden = s.echo.apply_async(
        ("secret",), {"card": "1234"}, argsrepr="(<a>)", kwargsrepr="{'card': '****'}"
    )
    s.get(hidden)
    sig = s.echo.s(card="1234").set(kwargsrepr=repr({"card": "*"}))
    s.get(sig.delay())
    sent = [e for e in s.side.events[hidden.id] if e["type"] == "task-received"]
    assert (sent[0]["args"], sent[0]["kwargs"]) == ("(<a>)", "{'card': '****'}")


@scenario("time limits of the call reach the task")
def limits(s: Stage) -> None:
    shown = s.get(s.show.apply_async(time_limit=30, soft_time_limit=20))
    assert shown["limits"] == [30, 20]
    assert s.get(s.works_softly.delay("shows"))


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


@scenario("a task must not wait for another's result, unless it is allowed to", wide=True)
def joining(s: Stage) -> None:
    assert s.get(s.joins.delay(True)) == 2
    error = s.error(s.joins.delay(False))
    assert isinstance(error, RuntimeError)


@scenario("reply_to, correlation_id and origin are what documents say", wide=True)
def correlation(s: Stage) -> None:
    result = s.show.apply_async()
    s.get(result)
    s.wait(lambda: "prerun" in s.kinds(result.id))
    line = next(each for each in s.side.lines[result.id] if each["kind"] == "prerun")
    assert line["context"]["correlation_id"] == result.id
    assert line["context"]["root_id"] == result.id
    assert line["context"]["hostname"] == s.side.node


@scenario("a task that does not know itself is refused by the worker", wide=True)
def unknown(s: Stage) -> None:
    result = s.app.send_task("tests.unknown", (1,))
    error = s.error(result)
    assert type(error).__name__ == "NotRegistered"
