"""A task's result is stored by the script that settles its record exactly where nothing but the trips changes."""

from __future__ import annotations

import datetime
import importlib.util
import re
import runpy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any
from unittest import mock

import celery
import celery.app.task
import celery.app.trace
import pytest
import redis
from celery import Celery, Task, signals
from celery.backends.redis import RedisBackend
from celery.canvas import Signature
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from redis.client import Monitor

from celery_idempotent import IdempotentTask, get_store
from celery_idempotent.celery import fused
from celery_idempotent.celery.delivery import identify_delivery
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import SettledWith, State
from celery_idempotent.stores.redis.store import RedisStore
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.support.apps import close_app

pytestmark = pytest.mark.redis

#: Celery < 5.7 has a clock of its own.
DATE = re.compile(rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}")
NOW = datetime.datetime(2026, 5, 4, 3, 2, 1, 678, tzinfo=datetime.timezone.utc)
#: What Celery's backend does to store a result.
CELERYS = ["GET", "MULTI", "SETEX", "PUBLISH", "EXEC"]
FUSED = ["MULTI", "SET", "PUBLISH", "EXEC"]
#: What connections begin with, what teaches the server a script, and what writes the counters now and then.
OTHERS = {"HELLO", "UNSUBSCRIBE", "CLIENT", "SELECT", "EVAL", "TIME", "HINCRBY", "EXPIRE", "PTTL"}


class Refused(Exception):
    """The bank will never accept this card."""


@dataclass
class Shop:
    """An app, one Redis for its results and its records, and what was asked of that."""

    app: Celery
    url: str
    asked: list[str] = field(default_factory=list)
    published: list[bytes] = field(default_factory=list)

    def run(self, name: str, *args: Any, task_id: str = "", **headers: Any) -> str:
        """Run a message as a worker's child does; return its task id."""
        task: Any = self.app.tasks[name]
        message = message_of(task, args, {})
        sent = ("callbacks", "errbacks", "chain", "chord")
        embed = {**message.embed, **{each: headers.pop(each, None) for each in sent}}
        message.headers.update(headers)
        if task_id:
            message.headers.update(id=task_id, root_id=task_id)
        task_id = message.headers["id"]
        message = replace(message, embed=embed)
        client = redis.Redis.from_url(self.url)
        channel = client.pubsub(ignore_subscribe_messages=True)
        channel.subscribe(self.key(task_id))
        channel.get_message(timeout=30)
        end = uuid.uuid4().hex
        with client.monitor() as monitor, mock.patch.object(self.app, "now", return_value=NOW):
            self.ended = deliver_message(task, message)
            client.publish(self.key(task_id), end)
            self.asked = list(self._asked(monitor, end))
        self.published = []
        while (told := channel.get_message(timeout=30))["data"] != end.encode():
            self.published.append(told["data"])
        channel.close()
        client.close()
        return task_id

    def _asked(self, monitor: Monitor, end: str) -> Iterator[str]:
        while end not in (said := monitor.next_command())["command"]:
            word = said["command"].split()[0].upper()
            here = str(said["db"]) == self.url.rpartition("/")[2] and said["client_type"] != "lua"
            if here and word not in OTHERS and "!layout" not in said["command"]:
                yield word

    def key(self, task_id: str) -> str:
        backend: Any = self.app.backend
        return str(backend.get_key_for_task(task_id).decode())

    def stored(self, task_id: str) -> tuple[Any, int, list[bytes]]:
        """Return the result as it is stored, for how long, and what was published."""
        with redis.Redis.from_url(self.url) as client:
            key = self.key(task_id)
            found = client.get(key)
            told = [DATE.sub(b"DATE", each) for each in self.published]
            return found and DATE.sub(b"DATE", found), client.ttl(key), told

    def state(self, name: str, task_id: str) -> State | None:
        task: Any = self.app.tasks[name]
        identity = identify_delivery(task._definition, {}, (), {}, task_id=task_id).identity
        record = get_store(self.app).get(identity)
        return record.state if record else None


class Apart(IdempotentTask):
    """A task whose results Celery stores, for it has a backend of its own."""

    abstract = True

    @property  # type: ignore[misc]  # of a property with a setter
    def backend(self) -> Any:
        return self.app.backend


@pytest.fixture
def open_shop(databases: Iterator[str]) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def open_shop(*, results: Any = None, **settings: Any) -> Shop:
        url = next(databases)
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(
            result_backend=results(url) if callable(results) else url,
            idempotency_store=url,
            **{"result_expires": 600, **settings},
        )
        options: Any = {"shared": False, "bind": True}
        ours: Any = {**options, "base": IdempotentTask, "idempotency_permanent_errors": Refused}
        app.task(name="pay", **ours)(pay)
        app.task(name="apart", **{**ours, "base": Apart})(pay)
        app.task(name="plain", base=Task, **options)(pay)
        app.task(name="quiet", ignore_result=True, **ours)(pay)
        erring: Any = {"ignore_result": True, "store_errors_even_if_ignored": True}
        app.task(name="erring", **erring, **ours)(pay)
        app.finalize()
        shops.append(Shop(app, url))
        return shops[-1]

    yield open_shop
    for shop in shops:
        get_store(shop.app).close()
        close_app(shop.app)


@pytest.fixture
def shop(open_shop: Callable[..., Shop]) -> Shop:
    return open_shop()


def pay(self: Any, what: str = "") -> Any:
    """Return, or raise, what the test wants."""
    match what:
        case "refused":
            raise Refused("no", 17)
        case "refused for a reason":
            try:
                int("no")
            except ValueError as error:
                raise Refused("no") from error
        case "broken":
            raise ValueError("for now")
        case "nothing":
            raise Ignore
        case "children":
            result = self.app.AsyncResult("a child")
            self.request.children.append(result)
        case "result":
            return self.app.AsyncResult("another")
        case "unserializable":
            return object()
        case "links":
            self.request.callbacks = [dict(LINK)]
        case "large":
            return "x" * 2_000_000
    return VALUES.get(what, {"paid": [1, "€", None, 2.5]})


# -- what is left out --------------------------------------------------------------------------------------------------


def test_celerys_own_trips_are_left_out(shop: Shop):
    task_id = shop.run("pay")
    assert shop.asked == ["EVALSHA", "EVALSHA"]
    assert shop.ended.value == shop.app.AsyncResult(task_id).get(timeout=30) == pay(None)
    assert shop.state("pay", task_id) is State.COMPLETED
    shop.run("plain")
    assert shop.asked == CELERYS


class Own(RedisBackend):
    """A backend of somebody's own."""


OWN = {"results": lambda url: f"{__name__}.Own+{url}"}
BY_CELERY: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "a failure": ("pay", "broken", "FAILURE", {}),
    "a permanent failure": ("pay", "refused", "FAILURE", {}),
    "a large result": ("pay", "large", "SUCCESS", {}),
    "a task with a backend of its own": ("apart", "", "SUCCESS", {}),
    "observing": ("pay", "", "SUCCESS", {"idempotency_mode": "observe"}),
    "a subclass of the backend": ("pay", "", "SUCCESS", OWN),
}


@pytest.mark.parametrize(("name", "what", "state", "settings"), BY_CELERY.values(), ids=BY_CELERY)
def test_celery_stores(
    open_shop: Callable[..., Shop], name: str, what: str, state: str, settings: dict[str, Any]
):
    shop = open_shop(**settings)
    task_id = shop.run(name, what)
    assert shop.asked == ["EVALSHA", "EVALSHA", *CELERYS]
    assert shop.app.AsyncResult(task_id).state == state


LINK = Signature("plain", args=("x",), immutable=True)


SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "a link that the body made": ("links", {}),
    "a link": ("", {"callbacks": [LINK]}),
    "an errback": ("", {"errbacks": [LINK]}),
    "a chain": ("", {"chain": [LINK]}),
    "a chord": ("", {"chord": Signature("plain"), "group": "g"}),
}


@pytest.mark.parametrize(("what", "sent"), SENT.values(), ids=SENT)
def test_celery_stores_what_something_is_sent_after(shop: Shop, what: str, sent: dict[str, Any]):
    with mock.patch.object(RedisBackend, "on_chord_part_return"):
        task_id = shop.run("pay", what, **sent)
    assert "SETEX" in shop.asked
    assert shop.app.AsyncResult(task_id).state == "SUCCESS"
    if what:
        assert [each.task for each in shop.ended.published] == ["plain"]


def test_a_duplicate_has_its_result_stored_in_one_trip(shop: Shop):
    task_id = shop.run("pay")
    assert shop.run("pay", task_id=task_id) == task_id
    assert shop.asked == ["EVALSHA", "GET"]  # Celery finds its success
    assert shop.published == []
    other = shop.run("pay", idempotency_key="k")
    again = shop.run("pay", idempotency_key="k")
    assert shop.asked == ["EVALSHA", *FUSED]
    assert shop.app.AsyncResult(other).result == shop.app.AsyncResult(again).result == pay(None)
    assert shop.ended.value == pay(None)


def test_one_that_is_ignored_is_not_stored(shop: Shop):
    for name in ("quiet", "erring"):
        task_id = shop.run(name)
        assert shop.asked == ["EVALSHA", "EVALSHA"]
        assert shop.stored(task_id) == (None, -2, [])
    task_id = shop.run("quiet", "refused")
    assert shop.asked == ["EVALSHA", "EVALSHA"]
    assert shop.stored(task_id)[0] is None
    # A publisher that does not know the task says nothing of it.
    assert shop.stored(shop.run("quiet", ignore_result=None))[0] is None


@pytest.mark.parametrize("home", [celery.app.task, celery.app.trace], ids=lambda m: m.__name__)
def test_celerys_rule_of_ignored_results_is_found_where_this_release_has_it(monkeypatch, home):
    for each in (celery.app.task, celery.app.trace):
        monkeypatch.delattr(each, "get_actual_ignore_result", raising=False)
    monkeypatch.setattr(home, "get_actual_ignore_result", len, raising=False)
    assert runpy.run_path(fused.__file__)["_is_ignored"] is len


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="the message decides from Celery 5.7 on")
def test_the_message_decides_whether_it_is_ignored(shop: Shop):
    ignored, wanted = shop.run("pay", ignore_result=True), shop.run("quiet", ignore_result=False)
    assert shop.stored(ignored)[0] is None
    assert shop.app.AsyncResult(wanted).state == "SUCCESS"
    assert shop.asked == ["EVALSHA", "EVALSHA"]


@pytest.mark.parametrize("how", ["eager", "pushed"])
def test_without_a_tracer_nothing_is_stored(shop: Shop, how: str):
    """Of an eager call, and where somebody pushed a request, as tests do, and called the task."""
    task: Any = shop.app.tasks["pay"]
    if how == "eager":
        assert task.apply(task_id=how).get() == pay(None)
    else:
        task.push_request(id=how, called_directly=False)
        assert task() == pay(None)
        task.pop_request()
        assert shop.state("pay", how) is State.COMPLETED
    assert shop.stored(how)[0] is None


# -- the same bytes ----------------------------------------------------------------------------------------------------

SERIALIZERS = [
    "json",
    "pickle",
    "yaml",
    *(["msgpack"] if importlib.util.find_spec("msgpack") else []),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    **{each: {"result_serializer": each, "accept_content": ["json", each]} for each in SERIALIZERS},
    "extended": {"result_extended": True},
    "a prefix": {"result_backend_transport_options": {"global_keyprefix": "shop"}},
    "for ever": {"result_expires": None},
    "always retried": {"result_backend_always_retry": True},
    "tracked": {"task_track_started": True},
}
if celery.VERSION >= (5, 7):
    SETTINGS["compressed"] = {"result_compression": "gzip"}
#: With these Celery stores the result: it is not plain JSON, or has fields that only Celery knows.
APART = {*SERIALIZERS, "extended", "compressed"} - {"json"}

VALUES: dict[str, Any] = {
    "none": None,
    "a truth": True,
    "a long int": 2**80,
    "a float": 0.1,
    "not a number": float("nan"),
    "text": "é\n\"'\u2028😀",
    "empty": [{}, [], ""],
    "a tuple": (1, (2, 3)),
    "keys": {1: "a", None: "b", False: "c", 2.5: "d"},
    "bytes": [b"ab", b"\xff\x00"],
    "a date": [NOW, NOW.date(), NOW.time()],
    "a decimal": Decimal("1.10"),
    "an id": uuid.UUID(int=7),
    "an envelope": {"__type__": "unknown", "__value__": "x"},
    "3 kB": {"x": ["ü" * 30] * 100},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("theirs", ["plain", "apart"])
def test_a_result_of_a_run_or_a_duplicate_is_stored_and_told_as_celery_does(
    open_shop: Callable[..., Shop], name: str, theirs: str
):
    shop = open_shop(**SETTINGS[name])
    more = ("result", *VALUES) if name == "as it comes" else ()
    for what in ("", "children", *more):
        headers: dict[str, Any] = {
            "parent_id": "a parent",
            "stamped_headers": ["by"],
            "stamps": {"by": "me"},
        }
        found = []
        for task in (theirs, "pay"):
            if theirs == "apart":  # so that each is a duplicate
                headers["idempotency_key"] = f"k {what}"
                shop.run(task, what, **headers)
            task_id = shop.run(task, what, task_id=f"the-task {what}", **headers)
            found.append(shop.stored(task_id))
            with redis.Redis.from_url(shop.url) as client:
                client.delete(shop.key(task_id))
        (payload, left, told), (payload_2, left_2, told_2) = found
        if name == "extended":
            name_of = b'"name": "%b"' % theirs.encode()
            payload, *told = (each.replace(name_of, b'"name": "pay"') for each in (payload, *told))
        apart = name in APART or what == "an envelope"
        if theirs == "apart" and name != "tracked":
            assert (shop.asked[-4:] == FUSED) is not apart, what
        else:
            assert shop.asked[-1] == ("EXEC" if apart or theirs == "apart" else "EVALSHA"), what
        assert payload_2 == payload
        assert told_2 == told
        assert told[-1] == payload
        assert left_2 == pytest.approx(left, abs=5)


# -- hooks and signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "end"), [("", "success"), ("refused", "failure")])
def test_hooks_and_signals_find_a_result_that_is_stored_and_the_backend_as_ever(
    shop: Shop, what: str, end: str
):
    heard: dict[str, Any] = {}

    def note(name: str, task: Any) -> None:
        state = task.AsyncResult(task.request.id).state
        heard[name] = task.request.ignore_result, type(task.backend), state

    names = (f"on_{end}", "after_return")
    hooks: Any = {n: lambda self, *_, n=n: note(n, self) for n in names}
    base = type("Heard", (IdempotentTask,), {"abstract": True, **hooks})
    options: Any = {"base": base, "shared": False, "bind": True, "name": "heard"}
    shop.app.task(idempotency_permanent_errors=Refused, **options)(pay)
    for name in (f"task_{end}", "task_postrun"):
        receiver: Any = lambda sender, name=name, **_: note(name, sender)  # noqa: E731
        getattr(signals, name).connect(receiver, sender=shop.app.tasks["heard"], weak=False)
    shop.run("heard", what)
    assert ("SETEX" in shop.asked) is bool(what)
    assert heard.keys() == {*names, f"task_{end}", "task_postrun"}
    assert set(heard.values()) == {(not what, RedisBackend, end.upper())}


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [False, True], ids=["a proxy refuses it", "only the result"])
def test_a_result_that_does_not_get_through_is_stored_by_celery_and_its_record_is_settled(
    shop: Shop, reached: bool
):
    def settle(self: Any, request: Any, result: Any) -> SettledWith:
        if not reached:
            raise StoreUnavailable("too large")
        assert self.settle(request)
        return "settled"

    with mock.patch.object(RedisStore, "settle_with_result", settle):
        task_id = shop.run("pay")
    assert shop.state("pay", task_id) is State.COMPLETED
    assert shop.asked == ["EVALSHA", "EVALSHA", *CELERYS]
    assert shop.app.AsyncResult(task_id).get(timeout=30) == pay(None)


def test_a_duplicates_result_that_does_not_get_through_is_left_to_celery(shop: Shop):
    shop.run("pay", idempotency_key="k")
    late = SoftTimeLimitExceeded()
    for answer in (StoreUnavailable("away"), StoreMisconfigured("refused"), late, False):
        with mock.patch.object(RedisStore, "write_result", side_effect=[answer]):
            task_id = shop.run("pay", idempotency_key="k")
        assert shop.asked == ["EVALSHA", *CELERYS]
        assert shop.app.AsyncResult(task_id).get(timeout=5) == pay(None)
        assert len(shop.published) == 1
