"""``IdempotentTask``: what it publishes, how it runs, and that it is a ``celery.Task`` in all else."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from celery import Celery, chain, group
from celery.app.trace import build_tracer
from celery.signals import before_task_publish
from kombu.exceptions import EncodeError, OperationalError

from celery_idempotent import (
    ALL_ARGUMENTS,
    IdempotentTask,
    InProgress,
    InvalidKey,
    InvalidOption,
    KeyMissing,
    ResultUnavailable,
    StoreUnavailable,
    current_claim,
)
from celery_idempotent.celery.callbacks import OUTCOME
from celery_idempotent.celery.publishing import lost_after_ms
from celery_idempotent.celery.task import make_store
from celery_idempotent.protocol import shield
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.records import claim_key
from tests.unit.conftest import Published


def ours(app: Celery, name: str = "t", **options: Any) -> Any:
    """Define a function as one of our tasks."""
    return app.task(name=name, base=IdempotentTask, shared=False, **options)


def keyed(app: Celery, runs: list[Any], answer: object = None, **options: Any) -> Any:
    """Define a task with a key, which notes its runs."""

    def task(key: Any) -> object:
        runs.append(key)
        return answer

    return ours(app, **{"idempotency_key": "key", **options})(task)


@pytest.fixture
def charge(app: Celery, runs: list[Any]) -> Any:
    @ours(app, "shop.charge", idempotency_key="order_id")
    def charge(order_id: str, amount: int = 1) -> str:
        runs.append(order_id)
        return f"receipt {order_id}"

    return charge


def deliver(app: Celery, message: SimpleNamespace, *, redelivered: bool = False) -> Any:
    """Have a message run as a worker's child runs it; return what the tracer says."""
    task, request = app.tasks[message.task], {**message.headers, **message.embed}
    info = {"redelivered": redelivered, "priority": message.properties.get("priority")}
    request |= {"args": message.args, "kwargs": message.kwargs, "is_eager": False}
    request |= {"properties": message.properties, "delivery_info": info, "hostname": "here"}
    tracer = build_tracer(task.name, task, app=app)
    return tracer(message.id, message.args, message.kwargs, request)


def send(published: Published, task: Any, *args: Any, **options: Any) -> SimpleNamespace:
    """Publish, and return the message."""
    task.apply_async(args, **options)
    return published[-1]


def hold(
    store: MemoryStore, key: str, namespace: str = "shop.charge", task_id: str = "o"
) -> Record:
    return claim_key(store, Identity(namespace=namespace, key=key), task_id=task_id)


def record(store: MemoryStore, key: str, namespace: str = "shop.charge") -> Any:
    return store.get(Identity(namespace=namespace, key=key))


class TestStamp:
    """Key, scope and fingerprint are computed at publish, and travel in one header."""

    def test_a_message_has_one_beside_the_headers_of_the_user(self, published, charge):
        mine = {"x-trace": "abc"}
        message = send(published, charge, "o-1", 5, headers=mine)
        assert (message.stamp["key"], message.stamp["id"]) == ("o-1", message.id)
        assert len(bytes.fromhex(message.stamp["fingerprint"])) == 16
        assert message.headers["x-trace"] == "abc"
        assert mine == {"x-trace": "abc"}
        given = send(published, charge, "o-1", idempotency_key="mine", idempotency_scope="b")
        assert (given.stamp["key"], given.stamp["scope"]) == ("mine", "b")
        assert not [name for name in given.properties if "idempotency" in name]

    def test_nothing_is_published_with_a_key_that_cannot_be_used(self, published, charge):
        for bad in (True, "", "a\nb", 1.5, "x" * 256):
            with pytest.raises(InvalidKey, match=r"shop\.charge"):
                charge.apply_async((bad,))
            with pytest.raises(InvalidKey, match=r"shop\.charge"):
                charge.apply_async(("o-1",), idempotency_key=bad)
        with pytest.raises(KeyMissing, match=r"shop\.charge"):
            charge.apply_async((None,))
        assert published == []

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [("kee", "did you mean idempotency_key?"), ("lease", "known are idempotency_key, ")],
    )
    def test_an_option_that_no_call_has_is_refused(self, app, published, charge, wrong, said):
        option = {f"idempotency_{wrong}": 1}
        off = ours(app, "off", idempotency_mode="off")(deliver)
        for call in (
            partial(charge.apply_async, ("o-1",), **option),
            charge.s("o-1").set(**option).apply_async,
            group(charge.s("o-1").set(**option)).apply_async,
            partial(off.apply_async, **option),
            partial(charge.apply, ("o-1",), **option),
        ):
            with pytest.raises(InvalidOption, match=f"{wrong} of a call .*{re.escape(said)}"):
                call()
        assert published == []


class TestForwardedHeaders:
    """A task that hands its own headers to another call hands on nothing that was said about its own message."""

    @pytest.fixture
    def family(self, app: Celery, runs: list[Any]) -> dict[str, Any]:
        """A parent, which does what it is told, and its children."""

        def parent(self: Any) -> None:
            family["does"](self)

        def child(n: int) -> str:
            runs.append(n)
            if n < 0:
                raise ValueError(n)
            return f"child {n}"

        family: dict[str, Any] = {
            "parent": ours(app, "parent", bind=True)(parent),
            "keyed": ours(app, "keyed", idempotency_key="n")(child),
            "child": ours(app, "child", idempotency_fingerprint=None)(child),
        }
        return family

    @staticmethod
    def send(app: Celery, published: Published, **given: Any) -> SimpleNamespace:
        """Send a message to the parent, by name, with these headers of ours."""
        headers = {f"idempotency_{name}": value for name, value in given.items()}
        app.send_task("parent", headers=headers)
        return published[-1]

    @staticmethod
    def has_run(app: Celery, published: Published, message: SimpleNamespace) -> None:
        """Deliver a message, and then all that comes of it."""
        at = published.index(message)
        while at < len(published):
            deliver(app, published[at])
            at += 1

    @pytest.mark.parametrize("how", ["call", "name", "chain", "link"])
    def test_each_child_runs(self, app, published, runs, family, how):
        def does(task: Any) -> None:
            headers, child = task.request.headers, family["child"]
            first, second = (child.si(n).set(headers=headers) for n in (1, 2))
            if how == "chain":
                chain(first, second).apply_async()
            elif how == "link":
                child.apply_async((1,), headers=headers, link=second)
            else:
                for n in (1, 2):
                    publish = app.send_task if how == "name" else child.apply_async
                    publish(*["child"] * (how == "name"), (n,), headers=headers)

        family["does"] = does
        self.has_run(app, published, self.send(app, published, key="batch-3"))
        assert sorted(runs) == [1, 2]

    def test_its_retry_keeps_what_was_said(self, app, store, published, family):
        def does(task: Any) -> None:
            if not task.request.retries:
                raise task.retry(countdown=0)
            raise ValueError

        family["does"] = does
        message = self.send(app, published, key="k", scope="tenant", keep_failure=True)
        deliver(app, message)
        retry = published[-1]
        assert (retry.id, retry.retries, retry.stamp["key"]) == (message.id, 1, "k")
        deliver(app, retry)
        found = store.get(Identity(namespace="parent", scope="tenant", key="k"))
        assert found.state is State.FAILED
        assert found.message is not None, "a person may run it again"

    def test_a_replacement_that_takes_them_along_runs(self, app, published, runs, family):
        """It has the task id of what it replaces, and is another operation."""

        def does(task: Any) -> None:
            family["does"] = lambda _: runs.append("replacement")
            raise task.replace(family["parent"].si().set(headers=task.request.headers))

        family["does"] = does
        self.has_run(app, published, self.send(app, published, key="k"))
        assert runs == ["replacement"]
        assert published[0].id == published[1].id


class TestCelerysStamps:
    def test_a_stamped_key_is_the_key_and_stays_a_stamp(self, app, store, published, charge, runs):
        sig = charge.s("o-1")
        sig.stamp(idempotency_key="stamped", idempotency_other="x")
        sig.apply_async()
        (message,) = published
        assert message.headers["stamps"].keys() == {"idempotency_key", "idempotency_other"}
        deliver(app, message)
        assert record(store, "stamped").state is State.COMPLETED
        assert record(store, "o-1") is None


class TestDelivery:
    """As a worker's child runs a message, without the worker."""

    def test_a_body_learns_its_claim(self, app, published, store):
        seen = []

        @ours(app, bind=True, idempotency_key="key")
        def task(self: Any, key: str) -> None:
            seen.append((self.idempotency.key, self.idempotency.token, current_claim() is None))
            self.idempotency.ensure()

        deliver(app, send(published, task, "k"))
        assert seen == [("k", record(store, "k", "t").token, False)]
        seen.clear()
        task("k")  # called as a function: a claim that holds nothing
        assert seen == [("k", 0, True)]

    def test_a_result_that_was_not_kept_comes_from_the_result_backend(
        self, app, published, runs, store
    ):
        task = keyed(app, runs, "kept by Celery", idempotency_store_result=False)
        first, second = (send(published, task, "k") for _ in range(2))
        deliver(app, first)
        assert record(store, "k", "t").value is None
        deliver(app, second)
        assert app.AsyncResult(second.id).result == "kept by Celery"
        app.AsyncResult(first.id).forget()
        deliver(app, first)
        assert isinstance(app.AsyncResult(first.id).result, ResultUnavailable)
        assert runs == ["k"]

    def test_a_redelivery_whose_result_nobody_keeps_is_no_failure(
        self, app, published, runs, store
    ):
        task = keyed(app, runs, "one's own", idempotency_store_result=False, ignore_result=True)
        first, second = (send(published, task, "k") for _ in range(2))
        deliver(app, first)
        assert deliver(app, first, redelivered=True).info is None
        assert runs == ["k"]
        assert deliver(app, second).info is not None, "who asks is told that it is not kept"

    def test_what_comes_back_of_a_message_without_a_stamp_has_its_key_whatever_the_body_did(
        self, app, published, runs, monkeypatch
    ):
        @ours(app, idempotency_key="event.id")
        def task(event: dict[str, int]) -> None:
            runs.append(event.pop("id"))

        @app.task(name="link", shared=False)
        def link(_: object) -> None: ...

        app.send_task("t", ({"id": 7},), link=app.signature("link"))
        (message,) = published
        assert message.stamp is None
        real = celery.Signature.apply_async

        def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.task == "link":
                raise OperationalError("down")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(celery.Signature, "apply_async", refused)
            deliver(app, message)
        again = published[-1]
        assert (again.id, list(again.args)) == (message.id, [{}])
        deliver(app, again)
        assert runs == [7]
        assert published[-1].task == "link"


class TestConflicts:
    def test_the_next_rounds_wait_longer_but_never_longer_than_allowed(
        self, app, store, published, runs
    ):
        task = keyed(app, runs, "ran", max_retries=0)
        theirs = hold(store, "k", "t")
        message = send(published, task, "k")
        waits = []
        for n in range(1, 8):
            deliver(app, published[-1])
            assert published[-1].stamp["conflicts"] == n
            assert published[-1].retries == 0
            waits.append(eta_in(published[-1]))
        assert all(wait <= 10 for wait in waits)
        assert min(waits[4:]) > 4
        # A takeover is not the ninth conflict of a lost worker, but the first of another run.
        store.release(theirs.identity, token=theirs.token)
        theirs = hold(store, "k", "t")
        deliver(app, published[-1])
        assert published[-1].stamp["conflicts"] == 1
        assert eta_in(published[-1]) <= 1
        store.release(theirs.identity, token=theirs.token)
        deliver(app, published[-1])
        assert runs == ["k"]
        assert app.AsyncResult(message.id).result == "ran"


def eta_in(message: SimpleNamespace) -> float:
    """How many seconds after its publishing a message is due."""
    due: timedelta = datetime.fromisoformat(message.headers["eta"]) - message.at
    return due.total_seconds()


class TestStoreFailures:
    @pytest.fixture(autouse=True)
    def _short_lock_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("celery_idempotent.protocol.run.CLAIM_SECONDS", 0.01)

    def break_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def away(*_: object, **__: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(MemoryStore, "claim", away)

    def test_an_open_task_runs_without_protection_until_the_store_is_back(
        self, app, store, published, runs, caplog, monkeypatch
    ):
        @ours(app, bind=True, idempotency_key="key", idempotency_on_store_error="open")
        def task(self: Any, key: str, retries: int = 0) -> None:
            runs.append(self.idempotency.step("pay", lambda: self.request.retries))
            if self.request.retries < retries:
                raise self.retry(countdown=0)

        with monkeypatch.context() as patch:
            self.break_store(patch)
            deliver(app, send(published, task, "k", 1))
            deliver(app, published[-1])
        assert runs == [0, 1]
        assert caplog.text.count("runs without protection") == 2
        for _ in range(2):
            deliver(app, send(published, task, "k"))
        assert runs == [0, 1, 0]


class TestAMessageThatCannotBePublishedAgain:
    @pytest.fixture
    def task(self, app: Celery, runs: list[Any]) -> Any:
        return keyed(app, runs)

    @pytest.fixture
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Those that were made; each test says what happens meanwhile, by :attr:`meanwhile`."""
        self.meanwhile: Any = lambda: None
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                self.meanwhile()

        monkeypatch.setattr(shield, "time", SimpleNamespace(sleep=pause))
        return pauses

    def refuse(self, app: Celery, error: Exception) -> None:
        def route(*_: Any, **__: Any) -> None:
            raise error

        app.conf.task_routes = (route,)
        amqp: Any = app.amqp
        amqp.flush_routes()
        amqp.router = amqp.Router()

    @pytest.mark.parametrize("late", [True, False])
    @pytest.mark.parametrize("error", [ValueError("countdown"), EncodeError("a set")])
    def test_for_no_fault_of_the_broker_waits_where_it_is(
        self, app, store, published, runs, task, pauses, late, error
    ):
        task.acks_late = late
        message = send(published, task, "k")
        other = hold(store, "k", "t")
        self.refuse(app, error)
        self.meanwhile = lambda: store.release(other.identity, token=other.token)
        deliver(app, message)
        assert (runs, len(pauses)) == (["k"], 3)
        assert pauses == sorted(pauses)
        assert app.AsyncResult(message.id).state == "SUCCESS"

    @pytest.mark.parametrize("error", [OperationalError("gone"), ConnectionResetError()])
    def test_goes_back_to_its_broker_once(self, app, store, published, runs, task, pauses, error):
        message = send(published, task, "k")
        other = hold(store, "k", "t")
        self.refuse(app, error)
        self.meanwhile = lambda: store.release(other.identity, token=other.token)
        back = deliver(app, message)
        assert (back.info.state, len(pauses)) == ("REJECTED", 1)
        deliver(app, message, redelivered=True)
        assert (runs, len(pauses)) == (["k"], 3)

    def test_whose_broker_has_no_copy_of_it_fails_with_its_callbacks_unsent(
        self, app, store, published, runs, task, pauses
    ):
        task.acks_late = False
        message = send(published, task, "k", link=task.si("next"))
        self.refuse(app, OperationalError("gone"))
        assert not hasattr(deliver(app, message).retval.exception, OUTCOME)
        assert app.AsyncResult(message.id).state == "FAILURE"
        kept = record(store, "k", "t")
        assert (kept.state, kept.delivered) == (State.COMPLETED, False)
        assert (runs, len(published), pauses) == (["k"], 1, [])

    def test_is_not_taken_for_one_that_goes_in_a_circle(self, app, store, published, task):
        """RabbitMQ drops what comes back to where it was, by what it wrote into the headers itself."""
        message = send(published, task, "k")
        hold(store, "k", "t")
        mine = {"x-mine": 1}
        theirs = {
            "x-death": [{"queue": "celery_delayed_0", "reason": "expired"}],
            "x-first-death-queue": "celery_delayed_0",
            "x-last-death-reason": "expired",
            "x-delivery-count": 1,
            "redelivered": True,
        }
        message.headers |= {**mine, **theirs}
        deliver(app, message)
        assert published[-1].headers.keys() & (mine | theirs).keys() == mine.keys()

    def test_counts_whole_seconds_where_its_broker_does(
        self, app, store, published, task, monkeypatch
    ):
        monkeypatch.setattr(app.pool.connection.transport, "driver_type", "amqp")
        seen: list[float] = []
        monkeypatch.setattr(
            "celery_idempotent.celery.republish._publish_again",
            lambda _, again: seen.append(again.options["countdown"]),
        )
        message = send(published, task, "k")
        hold(store, "k", "t")
        for _ in range(3):
            deliver(app, message)
        assert seen == [1, 1, 1]
        assert all(isinstance(each, int) for each in seen)


class TestRetries:
    @pytest.fixture
    def flaky(self, app: Celery, runs: list[Any]) -> Any:
        @ours(app, "flaky", bind=True, max_retries=3, idempotency_key="key")
        def flaky(self: Any, key: str, times: int = 1, changed: str = "") -> str:
            runs.append((self.request.retries, changed))
            if self.request.retries < times:
                raise self.retry(countdown=0, kwargs={"times": times, "changed": "yes"}, args=[key])
            return "done"

        return flaky

    def test_a_retry_keeps_key_and_fingerprint_whatever_its_arguments(
        self, app, store, published, flaky, runs
    ):
        free: list[bool] = []

        def note(**_: Any) -> None:
            free.append(record(store, "k", "flaky") is None)

        message = send(published, flaky, "k", headers={"x": 1})
        before_task_publish.connect(note, weak=False)
        deliver(app, message)
        before_task_publish.disconnect(note)
        assert free == [True], "or the retry could meet the claim of this run"
        (again,) = published[1:]
        assert again.stamp == message.stamp
        assert again.headers["x"] == 1
        assert again.retries == 1
        deliver(app, again)
        assert runs == [(0, ""), (1, "yes")]
        assert record(store, "k", "flaky").state is State.COMPLETED

    @pytest.mark.parametrize("stamps", [{}, {"idempotency_key": "k"}], ids=["", "Celery's stamps"])
    def test_a_retry_with_other_arguments_keeps_key_and_fingerprint_of_a_message_without_a_stamp(
        self, app, store, published, runs, stamps
    ):
        """It came from a program that knows nothing of keys."""

        @ours(app, bind=True, idempotency_key=None if stamps else "key")
        def task(self: Any, key: str, amount: int) -> str:
            runs.append((key, amount))
            if not self.request.retries:
                raise self.retry(countdown=0, args=["other", 2], kwargs={})
            return "done"

        signature = task.s("k", 1)
        signature.stamp(**stamps)
        signature.apply_async()
        message = published[-1]
        del message.headers["idempotency"]
        deliver(app, message)
        again = published[-1]
        assert (tuple(again.args), again.retries) == (("other", 2), 1)
        deliver(app, again)
        assert runs == [("k", 1), ("other", 2)]
        found = record(store, "k", "t")
        assert found.state is State.COMPLETED
        first = task._definition.identify(("k", 1), {}, task_id=message.id, key="k")
        assert found.fingerprint == first.fingerprint
        assert record(store, "other", "t") is None

    def test_what_is_sent_again_by_hand_with_its_headers_keeps_key_and_fingerprint(
        self, published, charge
    ):
        message = send(published, charge, "o-1", idempotency_key="given")
        again = send(published, charge, "o-2", task_id=message.id, headers=message.headers)
        assert again.stamp == message.stamp

    def test_a_conflict_is_not_seen_by_autoretry(self, app, store, published, runs):
        task = keyed(app, runs, autoretry_for=(Exception,), idempotency_on_conflict="raise")
        hold(store, "k", "t")
        message = send(published, task, "k")
        deliver(app, message)
        assert len(published) == 1
        assert isinstance(app.AsyncResult(message.id).result, InProgress)

    def test_another_call_of_the_same_task_in_a_run_is_no_retry(self, app, store, published):
        @ours(app, bind=True, idempotency_key="key")
        def task(self: Any, key: str, more: bool = True) -> str:
            if more:
                task.apply_async((key, False), idempotency_key="other")
                task.apply_async(("third", False))
            return "done"

        deliver(app, send(published, task, "k"))
        assert [message.stamp["key"] for message in published] == ["k", "other", "third"]
        assert record(store, "k", "t").state is State.COMPLETED


class TestObserving:
    """What would have been refused is said, and goes out as Celery would send it."""

    def test_every_call_is_published(self, app, published):
        @ours(app, idempotency_mode="observe", idempotency_publish_once=True, idempotency_key="key")
        def task(key: str, amount: int = 1) -> None: ...

        ids = {task.delay("k").id, task.delay("k").id, task.delay("k", 2).id}
        assert len(ids) == len(published) == 3

    @pytest.mark.parametrize(
        ("options", "argument"),
        [
            ({"idempotency_key": "key"}, None),
            ({"idempotency_key": ALL_ARGUMENTS}, object()),
            ({"idempotency_key": "key", "idempotency_scope": "key"}, 1.5),
        ],
    )
    def test_a_call_without_a_usable_key_goes_by_its_task_id(
        self, app, store, published, caplog, runs, options, argument
    ):
        task = keyed(app, runs, "ran", idempotency_mode="observe", serializer="pickle", **options)
        message = send(published, task, argument)
        assert "would have been refused" in caplog.text
        deliver(app, message)
        assert app.AsyncResult(message.id).result == "ran"
        assert record(store, f"@{message.id}", "t").state is State.COMPLETED
        message = send(published, task, argument)
        message.headers["idempotency"] = {"id": message.id, "key": 17}
        deliver(app, message)
        assert runs == [argument] * 2

    def test_no_sweep_sends_or_fails_what_is_only_observed(self, app, store, published, runs):
        """A second message would be a second run."""
        for n, policy in enumerate(("requeue", "fail")):

            @ours(app, policy, bind=True, idempotency_mode="observe", idempotency_on_stale=policy)
            def task(self: Any) -> None:
                runs.append(record(store, f"@{self.request.id}", self.name))
                raise self.retry(countdown=0)

            deliver(app, send(published, task))
            assert (runs[n].on_stale, runs[n].message) == ("interrupt", None)
            assert record(store, runs[n].identity.key, policy) is None


class TestFunctionCalls:
    def test_a_direct_call_is_a_function_call(self, charge, store, runs):
        assert charge("o-1") == charge("o-1") == "receipt o-1"
        assert runs == ["o-1", "o-1"]
        assert record(store, "o-1") is None


class TestEager:
    def test_apply_takes_a_key_and_a_scope(self, charge, runs, store):
        charge.apply(("o-1",), idempotency_key="mine", idempotency_scope="s").get()
        charge.apply(("o-1",), idempotency_key="mine", idempotency_scope="s").get()
        assert runs == ["o-1"]
        assert store.get(Identity(namespace="shop.charge", scope="s", key="mine")) is not None


class TestReplace:
    @pytest.mark.parametrize("how", ["a retry", "a replacement", "in a canvas"])
    def test_the_message_is_kept_until_the_next_one_with_its_key_is_there(
        self, app, store, published, charge, how
    ):
        """In a canvas its turn may come much later: nobody could say when it is lost."""

        @ours(app, bind=True, idempotency_key="key", idempotency_on_stale="requeue")
        def task(self: Any, key: str) -> Any:
            if self.request.replaced_task_nesting or self.request.retries:
                return "done"
            if how == "a retry":
                raise self.retry(countdown=100)
            sig = task.si(key).set(countdown=100)
            raise self.replace(sig if how == "a replacement" else charge.si("o-1") | sig)

        message = send(published, task, "k")
        deliver(app, message)
        (following,) = published[1:]
        found = store.get(Identity(namespace="t", key="k"))
        if how == "in a canvas":
            assert found is None
            return
        assert (found.state, found.task_id) == (State.QUEUED, message.id)
        assert found.deadline_ms - found.updated_ms == pytest.approx(160_000, abs=5000)
        assert found.message
        deliver(app, following)
        assert app.AsyncResult(message.id).result == "done"

    def test_one_that_keeps_the_count_of_retries_is_no_retry(self, app, store, published):
        @ours(app, bind=True, idempotency_key="key")
        def task(self: Any, key: str) -> Any:
            if not self.request.retries:
                raise self.retry(countdown=0)
            raise self.replace(task.s("other").set(retries=self.request.retries))

        deliver(app, send(published, task, "k"))
        deliver(app, published[-1])
        assert record(store, "k", "t").replaced

    @pytest.mark.parametrize(("age", "state"), [(499, "RETRY"), (501, "FAILURE")])
    def test_a_duplicate_does_not_wait_for_a_replacements_result_until_it_would_run_itself(
        self, app, published, age, state
    ):
        clock = FakeClock()
        app.conf.update(idempotency_store=MemoryStore(clock), result_extended=True)

        @ours(app, "quiet", ignore_result=True)
        def quiet() -> None: ...

        @ours(app, bind=True, idempotency_key="key", idempotency_retention=1000)
        def task(self: Any, key: str) -> Any:
            raise self.replace(quiet.si())

        deliver(app, send(published, task, "k"))
        clock.advance(age * 1000)
        duplicate = send(published, task, "k")
        deliver(app, duplicate)
        answer = app.AsyncResult(duplicate.id)
        assert answer.state == state
        if state == "FAILURE":
            assert isinstance(answer.result, ResultUnavailable)


def test_a_message_whose_eta_is_over_may_take_as_long_as_any_other():
    past = datetime.now(timezone.utc) - timedelta(hours=1)
    for options in ({"eta": past}, {"eta": past.isoformat()}, {"countdown": -3600}):
        assert lost_after_ms(options) == lost_after_ms({})


def test_the_time_limit_of_a_worker_is_that_of_its_own_app(app, store, published):
    """A shutdown gives the key back; a run that is ended at its limit leaves it to be counted as a crash."""

    @ours(app, idempotency_key="key")
    def task(key: str) -> None:
        raise SystemExit

    def end(worker_of: Celery) -> Any:
        worker: Any = SimpleNamespace(app=worker_of, time_limit=0.1)
        make_store(worker)
        with pytest.raises(SystemExit):
            deliver(app, send(published, task, "k"))
        return record(store, "k", "t")

    assert end(Celery("other", set_as_current=False)) is None
    assert end(app).state is State.PROCESSING


@pytest.fixture
def eager(app: Celery) -> Celery:
    app.conf.task_always_eager = True
    return app


def test_all_steps_of_a_chain_run_although_celery_gives_them_one_id(eager: Celery) -> None:
    @eager.task(base=IdempotentTask, shared=False)
    def add(a: int, b: int) -> int:
        return a + b

    steps = chain(add.s(1, 1), add.s(2), add.s(3))
    steps.freeze()
    assert steps.apply().get() == 7
    assert steps.apply_async(task_id="x").get() == 7


@pytest.mark.parametrize("key", [None, "name"])
def test_a_task_may_replace_itself(eager: Celery, key: str | None) -> None:
    @eager.task(base=IdempotentTask, bind=True, shared=False, idempotency_key=key)
    def countdown(self: Any, name: str, n: int) -> Any:
        return self.replace(countdown.s(name, n - 1)) if n else "end"

    assert countdown.apply(args=("a", 3)).get() == "end"


def test_a_retry_is_run(eager: Celery) -> None:
    @eager.task(base=IdempotentTask, bind=True, shared=False, idempotency_key="name")
    def persistent(self: Any, name: str) -> Any:
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.request.retries

    assert persistent.apply(("a",)).get() == persistent.apply(("a",)).get() == 2


def test_a_call_of_itself_with_its_own_key_is_a_conflict_at_once(eager: Celery) -> None:
    @eager.task(base=IdempotentTask, shared=False, idempotency_key="name")
    def nested(name: str) -> None:
        nested.apply((name,), throw=True)

    with pytest.raises(InProgress, match=r"nested key a is held by"):
        nested.apply(("a",), throw=True)
