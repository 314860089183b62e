"""What ``enqueue()`` promises, and what the status resource makes of it: records in memory, no server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from celery import Celery
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from celery_idempotent.django.http import (
    aenqueue,
    enqueue,
    idempotent_view,
    keyed_view,
)
from celery_idempotent.django.http.responses import status
from celery_idempotent.errors import InvalidOption, ProcessingTimedOut, StoreUnavailable
from celery_idempotent.http import enqueueing as core
from celery_idempotent.protocol import lease
from celery_idempotent.records import State, Stored
from celery_idempotent.signals import worker_name
from celery_idempotent.stores import get_store
from celery_idempotent.stores.memory import MemoryStore
from tests.http.test_routes import messages
from tests.sql.databases import execute, rows
from tests.support.apps import redefine
from tests.support.records import settle_key
from tests.support.telling import Heard, assert_told, listening
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("django")

Ask = Callable[..., Any]


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("orders", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.idempotency_store = "memory://"
    yield made
    made.close()


@pytest.fixture
def charge(app: Celery) -> Iterator[Any]:
    """A task of the app that all views work with."""
    from celery_idempotent import IdempotentTask

    @app.task(base=IdempotentTask, name="orders.charge", shared=False)
    def charge(amount: int) -> int:
        return amount

    with override_settings(CELERY_IDEMPOTENT_APP=app):
        yield charge


def request(method: str = "post", path: str = "/", **headers: str) -> Any:
    from django.contrib.auth.models import User

    made = getattr(RequestFactory(), method)(path, headers={"Idempotency-Key": "k", **headers})
    made.user = User(pk=7, username="ann")
    return made


def by(asked: Any) -> str:
    return str(asked.headers.get("X-Tenant"))


def queue(charge: Any, asked: Any = None, *, amount: Any = 1, **options: Any) -> Any:
    return enqueue(asked or request(), charge, kwargs={"amount": amount}, **options)


def look(address: str, **headers: str) -> Any:
    """Ask the status resource, as the user of :func:`request`."""
    from urllib.parse import unquote

    _, _, namespace, key = address.split("/")
    return status(request("get", address, **headers), unquote(namespace), unquote(key))


def end(
    charge: Any,
    state: Any = State.COMPLETED,
    *,
    error: Exception | None = None,
    value: Stored | None = None,
) -> None:
    """Do what a worker does."""
    definition = charge.idempotency_definition()
    if error is not None:
        state, value = State.FAILED, definition.codec.dump_error(error)
    settle_key(_store(charge), definition.identifier.identity("k", ("user", 7)), state, value)


def _store(charge: Any) -> Any:
    from celery_idempotent import get_store

    return get_store(charge.app)


# Addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["scope of the call", "scope of the view", "app"])
def test_where_the_status_resource_would_not_find_the_key_there_is_no_location(
    charge: Any, how: str
) -> None:
    options: dict[str, Any] = {}
    app = Celery("other", set_as_current=False) if how == "app" else charge.app
    if how == "scope of the call":
        options["scope"] = ("tenant", 5)
    view = keyed_view(**({"scope": by} if how == "scope of the view" else {}))(
        lambda asked: queue(charge, asked, **options)
    )
    for replayed in (False, True):
        with override_settings(CELERY_IDEMPOTENT_APP=app):
            answer = view(request(x_tenant="acme"))
        assert (answer.status_code, "Idempotent-Replayed" in answer) == (202, replayed)
        assert "Location" not in answer
        assert json.loads(answer.content)["url"] is None


@override_settings(IDEMPOTENCY_HTTP={"scope": by})
def test_with_the_scope_of_the_setting_there_is_one_again(charge: Any) -> None:
    answer = queue(charge, request(x_tenant="acme"))
    assert look(answer["Location"], x_tenant="acme").status_code == 200
    assert look(answer["Location"], x_tenant="umbrella").status_code == 404
    assert "Location" in queue(charge, request(x_tenant="acme"), scope=by)


# What is told --------------------------------------------------------------------------------------------------------


def test_a_result_backend_that_is_down_is_503_for_who_asks_and_for_who_posts_again(
    charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = queue(charge)["Location"]
    end(charge)

    def down(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(charge.app.backend, "get_task_meta", down)
    for answer in (look(where), queue(charge)):
        assert (answer.status_code, json.loads(answer.content)["code"]) == (
            503,
            "result_unavailable",
        )
        assert json.loads(answer.content)["retryable"] is True
        assert "Retry-After" in answer
    monkeypatch.undo()
    # The backend knows nothing of it: that is an answer.
    assert json.loads(look(where).content)["result_kept"] is False


KEPT = Stored(content_type="application/json", content_encoding="utf-8", body=b'{"paid": 1}')


def test_of_a_task_that_the_web_server_does_not_know_it_cannot_say_whether_a_result_is_kept(
    charge: Any,
) -> None:
    """Tasks are loaded as by a worker: tests/unit/test_definition.py."""
    where = queue(charge)["Location"]
    end(charge, value=KEPT)
    web = Celery("orders", broker="memory://", set_as_current=False)
    web.conf.idempotency_store = _store(charge)
    with override_settings(CELERY_IDEMPOTENT_APP=web):
        told = json.loads(look(where).content)
    assert told["state"] == "COMPLETED"
    assert not {"result", "result_kept"} & told.keys()


def test_an_unknown_key_and_a_store_that_is_down_are_problems_for_browsers_too(
    charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise StoreUnavailable("nobody there")

    where = queue(charge)["Location"]
    unknown = look(f"{where}x", accept="text/html")
    monkeypatch.setattr(MemoryStore, "get", down)
    away = look(where, accept="text/html")
    assert (unknown.status_code, away.status_code) == (404, 503)
    assert int(away["Retry-After"]) >= 1
    for answer in (unknown, away):
        assert answer["Content-Type"] == "application/problem+json"
        assert {"Authorization", "Cookie"} <= set(answer["Vary"].split(", "))


# In a coroutine, and what may be said -------------------------------------------------------------------------------


class CardError(Exception):
    """A card is declined."""


class OddError(CardError):
    """Made of other arguments than it hands on: Celery cannot make it again."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def test_a_declared_failure_has_the_status_that_the_view_gives_it(charge: Any) -> None:
    redefine(charge, idempotency_permanent_errors=(CardError, KeyError))
    statuses: dict[type[Exception], int] = {CardError: 402}
    where = queue(charge, error_status=statuses)["Location"]
    end(charge, error=CardError("declined"))
    shown = json.loads(look(where).content)
    assert (shown["state"], shown["retryable"]) == ("FAILED", False)
    assert (shown["error"]["type"], shown["error"]["message"]) == ("CardError", "declined")
    answer = queue(charge, error_status=statuses)
    told = json.loads(answer.content)
    assert (answer.status_code, told["status"], told["retryable"]) == (402, 402, False)
    assert (told["code"], told["detail"]) == ("task_failed", "declined")
    assert answer["Idempotent-Replayed"] == "true"
    assert queue(charge, error_status={KeyError: 402}).status_code == 500
    assert queue(charge).status_code == 500


@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "detail"),
    [
        (OddError("declined", "card"), 500, "task_failed", "ResultUnavailable", "is a OddError"),
        (ProcessingTimedOut("lost"), 504, "timed_out", "ProcessingTimedOut", "lost"),
    ],
)
def test_a_failure_of_which_the_view_says_nothing_has_a_status_of_the_library(
    charge: Any, error: Exception, status: int, code: str, kind: str, detail: str
) -> None:
    redefine(charge, idempotency_permanent_errors=(CardError,))
    queue(charge)
    end(charge, error=error)
    answer = queue(charge, error_status={CardError: 402})
    told = json.loads(answer.content)
    assert (answer.status_code, told["code"], told["retryable"]) == (status, code, False)
    assert told["error"]["type"] == kind
    assert detail in told["detail"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"error_status": {KeyError: 402}}, "KeyError is not in idempotency_permanent_errors"),
        ({"error_status": {CardError: 200}}, "400 to 599"),
        *(({name: "mine"}, name) for name in ("task_id", "idempotency_key", "idempotency_scope")),
    ],
)
def test_an_option_that_is_not_the_callers_or_has_no_effect_is_refused(
    charge: Any, options: dict[str, Any], said: str
) -> None:
    redefine(charge, idempotency_permanent_errors=(CardError,))
    with pytest.raises(InvalidOption, match=said):
        queue(charge, **options)
    assert record(charge) is None


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_what_is_sent_after_the_commit_is_the_call_as_it_was(
    charge: Any, app: Celery, mode: str
) -> None:
    redefine(charge, idempotency_mode=mode)
    messages(app)
    with transaction.atomic():
        order = {"amount": 1}
        enqueue(request(), charge, kwargs=order)
        order.clear()
    with app.connection_for_read() as connection:
        channel: Any = connection.channel()
        found = channel.basic_get(app.conf.task_default_queue, no_ack=True)
    assert json.loads(found.body)[1] == {"amount": 1}


def test_a_hook_that_fails_after_the_commit_does_not_keep_the_message_back(
    charge: Any, app: Celery
) -> None:
    """Django calls no hook after one that fails, and drops them as it does after a rollback."""

    def fails() -> None:
        raise ValueError

    def view() -> None:
        with transaction.atomic():
            transaction.on_commit(fails)
            queue(charge)

    messages(app)
    with pytest.raises(ValueError):
        view()
    assert messages(app) == 1
    answer = queue(charge)
    assert (answer.status_code, answer["Idempotent-Replayed"]) == (202, "true")
    assert messages(app) == 0


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_for_a_task_that_is_off_or_observed_every_request_sends_a_message_after_its_commit(
    charge: Any, app: Celery, mode: str
) -> None:
    redefine(charge, idempotency_mode=mode)
    messages(app)
    # With a key, without one, and of nobody.
    for key, user in (("k", True), ("k", True), ("", True), ("k", False)):
        asked = request(idempotency_key=key)
        if not user:
            asked.user = None
        answer = queue(charge, asked)
        assert (answer.status_code, "Idempotent-Replayed" in answer) == (202, False)
    assert messages(app) == 4
    with transaction.atomic():
        queue(charge)
        assert messages(app) == 0
    assert messages(app) == 1
    with transaction.atomic():
        queue(charge)
        transaction.set_rollback(True)
    assert messages(app) == 0


def test_in_a_coroutine_there_is_an_enqueue_that_is_awaited(charge: Any) -> None:
    async def view() -> Any:
        return await aenqueue(request(), charge, kwargs={"amount": 1}, countdown=5)

    first, second = asyncio.run(view()), asyncio.run(view())
    assert (first.status_code, second.status_code) == (202, 202)
    assert second["Idempotent-Replayed"] == "true"


def test_the_other_one_says_so(charge: Any) -> None:
    async def view() -> Any:
        return queue(charge)

    with pytest.raises(SynchronousOnlyOperation, match="await aenqueue"):
        asyncio.run(view())
    assert charge.idempotency_record("k", scope=("user", 7)) is None


def record(charge: Any) -> Any:
    return charge.idempotency_record("k", scope=("user", 7))


def test_what_a_transaction_queues_is_promised_once_it_is_committed(
    charge: Any, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition waits for the COMMIT for a moment, is 409 then, and runs anew after a ROLLBACK."""
    from concurrent import futures

    messages(app)
    with transaction.atomic():
        assert queue(charge).status_code == 202
        transaction.set_rollback(True)
    assert messages(app) == 0
    with futures.ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            answer = queue(charge)
            assert (answer.status_code, "Idempotent-Replayed" in answer) == (202, False)
            assert record(charge).message is None, "nothing to be sent after a ROLLBACK"
            assert look(answer["Location"]).status_code == 404
            short = record(charge).deadline_ms - record(charge).updated_ms
            with monkeypatch.context() as patch:
                patch.setattr(core, "REQUEST_RETRY_SECONDS", 0.2)
                refused = queue(charge)
            told = json.loads(refused.content)["code"]
            assert (refused.status_code, told) == (409, "request_in_progress")
            assert "Retry-After" in refused
            second = pool.submit(queue, charge)
            with pytest.raises(futures.TimeoutError):
                second.result(0.3)
            assert messages(app) == 0
        assert second.result(60).status_code == 202
    assert (messages(app), look(answer["Location"]).status_code) == (1, 200)
    assert record(charge).deadline_ms - record(charge).updated_ms > short


def break_broker(app: Any) -> None:
    app.conf.update(broker_connection_retry=False, task_publish_retry=False)
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0}
    app.conf.broker_url = "amqp://127.0.0.1:1//"


def test_a_broker_that_is_down_at_the_commit_leaves_the_message_to_the_sweep(charge: Any) -> None:
    break_broker(charge.app)
    with transaction.atomic():
        assert queue(charge).status_code == 202
    assert record(charge).message is not None
    assert queue(charge).status_code == 202


def test_while_the_broker_is_down_it_is_503_and_the_key_stays_free(charge: Any) -> None:
    break_broker(charge.app)
    answer = queue(charge)
    assert (answer.status_code, json.loads(answer.content)["code"]) == (503, "not_queued")
    assert "Retry-After" in answer
    assert record(charge) is None
    end(charge, value=KEPT)
    assert queue(charge).status_code == 200, "what is done needs no broker"


def test_the_message_that_a_sweep_would_send_is_the_one_that_was_sent(charge: Any) -> None:
    begun = datetime.now(timezone.utc)
    options = {"countdown": 600, "expires": 900, "queue": "slow", "headers": {"mine": 1}}
    assert queue(charge, **options).status_code == 202
    kept = record(charge)
    again = charge.idempotency_definition().codec.load_message(kept.message)
    assert (again.task, again.args, again.kwargs) == ("orders.charge", [], {"amount": 1})
    assert (again.options["task_id"], again.options["queue"]) == (kept.task_id, "slow")
    for name, seconds in (("eta", 600), ("expires", 900)):
        meant = datetime.fromisoformat(again.options[name])
        assert abs(meant - begun - timedelta(seconds=seconds)) < timedelta(seconds=60)
    assert kept.deadline_ms - kept.created_ms >= 660_000, "not lost before its time has come"
    with charge.app.connection_for_write() as connection:
        first = connection.default_channel._get("slow")
        again.apply_async()
        second = connection.default_channel._get("slow")
    for header in ("id", "mine", "idempotency"):
        assert first["headers"][header] == second["headers"][header]
    assert first["headers"]["idempotency"]["keep_failure"] is True
    assert first["body"] == second["body"]


# Records in the database ---------------------------------------------------------------------------------------------


@pytest.fixture
def sql(charge: Any) -> Iterator[Any]:
    """The task, with its records in the database that the views write to."""
    from tests.sql import databases

    databases.migrate("default")
    charge.app.conf.update(idempotency_store="django://", task_default_queue="orders-in-sql")
    yield charge
    _store(charge).forget(charge.idempotency_definition().identifier.identity("k", ("user", 7)))


def test_what_was_reserved_and_never_staged_is_not_promised_to_anybody(
    sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(core, "UNCOMMITTED_MS", 1500)
    monkeypatch.setattr(core, "REQUEST_RETRY_SECONDS", 0.1)
    # Between the reservation and the message, with nobody left to give the key back.
    with monkeypatch.context() as patch:
        patch.setattr(core.Order, "queue", kill)
        patch.setattr(core.Order, "give_back", lambda *_: None)
        with pytest.raises(Killed):
            queue(sql)
    reserved = sql.idempotency_record("k", scope=("user", 7))
    assert (reserved.state, reserved.message) == (State.QUEUED, None)
    assert queue(sql).status_code == 409
    again = wait_for(lambda: _other_than(409, queue(sql)), 30)
    assert (again.status_code, "Idempotent-Replayed" in again) == (202, False)
    promised = sql.idempotency_record("k", scope=("user", 7))
    assert promised.task_id == reserved.task_id
    assert promised.message is not None, "should the broker lose it, a sweep sends it again"
    assert promised.deadline_ms - promised.updated_ms >= 60_000
    assert queue(sql)["Idempotent-Replayed"] == "true"
    assert get_store(sql.app).stats().outbox == 0, "it was sent"
    with sql.app.connection_for_write() as connection:
        sent = connection.default_channel._get("orders-in-sql")
    assert sent["headers"]["id"] == reserved.task_id


def test_a_message_that_cannot_be_sent_waits_in_the_database_for_the_broker(sql: Any) -> None:
    break_broker(sql.app)
    answer = queue(sql)
    try:
        assert (answer.status_code, json.loads(answer.content)["state"]) == (202, "QUEUED")
        assert get_store(sql.app).stats().outbox == 1
    finally:
        execute("default", "DELETE FROM celery_idempotent_outbox")


def test_a_reservation_that_is_not_answered_in_time_is_sent_when_the_store_answers(
    charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its repetition is answered 202: that is a promise."""
    store, heartbeat = _store(charge), lease.Heartbeat()
    reserve = store.reserve

    def unanswered(request: Any) -> None:
        reserve(request)
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(core, "REQUEST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(core, "heartbeat", heartbeat)
    monkeypatch.setattr(heartbeat, "start", lambda: None)
    charge.app.conf.task_default_queue = "orders-late"
    with monkeypatch.context() as patch:
        patch.setattr(store, "reserve", unanswered)
        assert queue(charge).status_code == 503
    assert queue(charge)["Idempotent-Replayed"] == "true"
    for given_up in heartbeat._given_up:
        for _ in range(2):
            given_up.due = 0.0
            heartbeat._undo_due()
    reserved = charge.idempotency_record("k", scope=("user", 7))
    with charge.app.connection_for_write() as connection:
        channel = connection.default_channel
        assert channel._get("orders-late")["headers"]["id"] == reserved.task_id
        assert channel._size("orders-late") == 0


def test_an_atomic_view_without_a_key_is_a_transaction_too(sql: Any) -> None:
    asked, statuses = request(), [503, 201]
    del asked.META["HTTP_IDEMPOTENCY_KEY"]

    @idempotent_view(atomic=True, required=False)
    def view(_: Any) -> HttpResponse:
        execute("default", "INSERT INTO atomic_effects VALUES (1)")
        return HttpResponse(status=statuses.pop(0))

    execute("default", "CREATE TABLE atomic_effects (n integer)")
    try:
        for status, kept in ((503, 0), (201, 1)):
            assert view(asked).status_code == status
            assert rows("default", "SELECT count(*) FROM atomic_effects") == [(kept,)]
    finally:
        execute("default", "DROP TABLE atomic_effects")


def _other_than(status: int, answer: Any) -> Any:
    return answer if answer.status_code != status else None


# Each outcome is told once: one event, one count, one line ------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as heard:
        yield heard


def told(heard: Heard, *expected: str) -> None:
    about = {"task": "orders.charge", "namespace": "billing", "who": worker_name(os.getpid())}
    assert_told(heard, *expected, **about)


BEFORE: dict[str, Callable[[Any], Any]] = {
    "queued": queue,
    "completed": end,
    "failed for good": partial(end, state=State.FAILED),
    "failed": partial(end, error=ConnectionError("the bank is away")),
}


@pytest.mark.parametrize(
    ("before", "amount", "status", "expected"),
    [
        ("queued", 1, 202, ["reserved QUEUED", "replayed"]),
        ("queued", 2, 422, ["reserved QUEUED", "mismatched"]),
        ("completed", 1, 200, ["replayed"]),
        ("failed for good", 1, 500, ["replayed"]),
        ("failed", 1, 202, ["forgotten", "reserved QUEUED"]),
    ],
)
def test_each_repetition_is_told(
    charge: Any, heard: Heard, before: str, amount: int, status: int, expected: list[str]
) -> None:
    redefine(charge, idempotency_namespace="billing")
    BEFORE[before](charge)
    assert queue(charge, amount=amount).status_code == status
    told(heard, *expected)


def test_a_store_that_is_away_is_told(
    charge: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(core, "REQUEST_RETRY_SECONDS", 0)
    monkeypatch.setattr(MemoryStore, "reserve", reserve)
    assert queue(charge).status_code == 503
    assert heard.names == ["store_failed"]
    assert heard.counted == {("orders.charge", "store_failed"): 1}
    assert isinstance(heard.events[0][2].error, StoreUnavailable)
    assert [line.levelname for line in heard.lines] == ["WARNING"]


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
def test_a_reservation_of_a_transaction_is_told_once_it_is_committed(
    charge: Any, heard: Heard, commits: bool
) -> None:
    redefine(charge, idempotency_namespace="billing")
    with transaction.atomic():
        assert queue(charge).status_code == 202
        assert heard.names == []
        transaction.set_rollback(not commits)
    told(heard, *["reserved QUEUED"] * commits)


@pytest.mark.usefixtures("charge")
def test_a_view_that_is_asked_twice_is_told(heard: Heard) -> None:
    view = idempotent_view(lambda _: HttpResponse("paid"))
    assert [view(request()).status_code for _ in range(2)] == [200, 200]
    # By the name that lists their records.
    about = {"task": "http", "namespace": "http", "who": worker_name(os.getpid())}
    assert_told(heard, "claimed PROCESSING", "settled COMPLETED", "replayed", **about)
