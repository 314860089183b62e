"""Messages that are committed with the data they are about: on every database, under every failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import kombu.pools
import pytest
from celery import chain, chord, group
from click.testing import CliRunner

from celery_idempotent.celery.sweep import sweep as whole_sweep
from celery_idempotent.cli import idempotency
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured
from celery_idempotent.records import Reserved, ReserveRequest
from celery_idempotent.stores import get_store
from tests.sql.databases import KINDS, rows
from tests.sql.outbox_support import Stage, ids, make_app, sent
from tests.support.proxy import Proxy
from tests.support.pydantic_tasks import make_pydantic_task
from tests.support.threads import all_at_once
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import connections, transaction

#: How a connection says that it waits for a lock no longer than this.
LOCK_PATIENCE = {
    "postgresql": {"options": "-c lock_timeout=20ms"},
    "mariadb": {"init_command": "SET innodb_lock_wait_timeout = 1"},
    "sqlite": {"timeout": 0.05},
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, open_store: Callable[..., Any]) -> Any:
    return open_store(request.param)


@pytest.fixture
def stage(alias: str) -> Iterator[Stage]:
    """An outbox in each kind of database in turn."""
    with closing(make_app(alias)) as app:
        yield Stage(alias, app)


@pytest.fixture
def lite(use_database: Callable[..., str]) -> Iterator[Stage]:
    """An outbox in SQLite, where the database makes no difference."""
    alias = use_database("sqlite")
    with closing(make_app(alias)) as app:
        yield Stage(alias, app)


def test_a_request_whose_message_cannot_be_staged_gives_its_key_back(alias: str):
    """The view may answer 400, and its transaction commits: nobody is promised a message that does not exist."""
    from django.contrib.auth.models import User
    from django.test import RequestFactory, override_settings

    from celery_idempotent.django.http import enqueue

    with closing(make_app(alias)) as app, override_settings(CELERY_IDEMPOTENT_APP=app):
        stage = Stage(alias, app)
        request: Any = RequestFactory().post("/", headers={"Idempotency-Key": "k"})
        request.user = User(pk=7)
        with stage.atomic(), pytest.raises(IdempotencyError, match="staged"):
            enqueue(request, app.tasks["note"], args=("x" * 2_000_000,), using=alias)
        assert rows(alias, "SELECT 1 FROM celery_idempotent_record WHERE state = 'Q'") == []
        with stage.atomic():
            assert enqueue(request, app.tasks["note"], args=(1,), using=alias).status_code == 202
        assert len(ids(app)) == 1


def test_a_pydantic_model_is_staged_as_its_message_carries_it(lite: Stage):
    from celery_idempotent.django import IdempotentTask

    def pay(order: Any) -> None: ...

    task, order = make_pydantic_task(lite.app, pay, base=IdempotentTask, idempotency_key="order.id")
    with lite.atomic():
        lite.add(task, (order(id=17),))
    ((_, body, _),) = sent(lite.app)
    assert body[0] == [{"id": 17}]


class TestOnEveryDatabase:
    def test_a_message_is_sent_after_the_commit_and_what_is_rolled_back_is_not(self, stage: Stage):
        stage.rolls_back(1)
        with stage.atomic():
            first = stage.notes(2)
            stage.rolls_back(3)
            last = stage.notes(4)
            assert ids(stage.app) == []
            assert [each.task_id for each in stage.pending()] == first + last
        assert ids(stage.app) == first + last
        assert stage.pending() == []

    def test_what_a_dead_sender_left_is_sent_in_order_once_its_lease_is_over(self, stage: Stage):
        staged = stage.dies_after_commit(1, 2, 3)
        assert stage.sweep()[0] == 0, "a sender that may live is left alone"
        assert [each.due_in_ms > 30_000 for each in stage.pending()] == [True] * 3
        stage.pass_time()
        assert stage.sweep() == (3, 0)
        assert ids(stage.app) == staged
        assert stage.pending() == []

    def test_a_message_that_cannot_be_sent_stays_and_holds_up_no_other(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ):
        with stage.atomic():
            first = stage.notes(1)
            bad = stage.add("free", (2,))
            monkeypatch.delitem(stage.app.tasks, "free")
            last = stage.notes(3)
        assert ids(stage.app) == first + last
        (failed,) = stage.pending()
        assert (failed.task_id, failed.attempts) == (bad, 1)
        assert failed.error.startswith("NotRegistered: ")
        assert 0 <= failed.age_ms < 60_000
        assert 0 < failed.due_in_ms <= 1250
        assert stage.sweep()[0] == 0, "it rests"

        for attempt, shortest, longest in (
            (2, 1_000, 2_500),
            (5, 11_000, 20_000),
            (60, 220_000, 375_000),
        ):
            stage.rows.update(attempts=attempt - 1)
            stage.pass_time()
            assert stage.sweep() == (0, 1)
            (failed,) = stage.pending()
            assert failed.attempts == attempt
            assert shortest < failed.due_in_ms <= longest

        monkeypatch.undo()
        obj = SimpleNamespace(app=stage.app)
        shown = CliRunner().invoke(idempotency, ["stats"], obj=obj).stdout
        assert "1 in the outbox, the oldest for" in shown
        swept = CliRunner().invoke(idempotency, ["sweep", "--now"], obj=obj).stdout
        assert "outbox_sent 1" in swept
        assert ids(stage.app) == [bad]
        assert stage.pending() == []

    def test_after_a_message_that_did_not_reach_the_broker_the_others_wait_for_a_sweep(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ):
        tried = stage.break_broker(monkeypatch)
        with stage.atomic():
            staged = stage.notes(1, 2, 3)
        assert len(tried) == 1, "a worker is not held up by each of them"
        assert [(each.attempts, each.error) for each in stage.pending()] == [
            (1, "OperationalError: amqp://***@broker is away"),
            (0, ""),
            (0, ""),
        ]
        stage.pass_time()
        assert stage.sweep() == (0, 1), "nor is a sweep"
        assert sum(each.attempts for each in stage.pending()) == 2
        monkeypatch.undo()
        stage.pass_time()
        assert stage.sweep()[0] == 3
        assert ids(stage.app) == staged

    def test_any_number_of_sweeps_send_every_message_once(self, stage: Stage):
        staged = stage.dies_after_commit(*range(60))
        stage.pass_time()
        # This makes the broker's queue. Several threads at once might each make one, and lose a message in it.
        assert ids(stage.app) == []

        def sweep(_: int) -> None:
            with closing(connections[stage.alias]):
                stage.sweep()

        all_at_once(4, sweep)
        # In a deadlock of two sweeps (MariaDB) one of them leaves the message to the next.
        stage.sweep()
        assert Counter(ids(stage.app)) == Counter(staged)

    def test_a_message_that_is_sent_and_not_deleted_is_sent_again_the_same(self, stage: Stage):
        with stage.dies_before_delete():
            stage.add("note", (7,), countdown=60, expires=120, headers={"trace": "x"})
        ((headers, body, _),) = sent(stage.app)
        stage.pass_time()
        assert stage.sweep()[0] == 1
        ((again, same, _),) = sent(stage.app)
        assert again == headers
        assert same == body
        assert headers["idempotency"]["id"] == headers["id"]
        assert headers["idempotency"]["key"] == "7"

    def test_a_sweep_leaves_alone_what_another_took_meanwhile(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ):
        staged = stage.dies_after_commit(1, 2, 3)
        stage.pass_time()
        publish = stage.app.amqp.send_task_message

        def slowly(*args: Any, **options: Any) -> Any:
            found = publish(*args, **options)
            stage.rows.exclude(task_id=staged[0]).update(due_ms=2**62)
            return found

        monkeypatch.setattr(stage.app.amqp, "send_task_message", slowly)
        assert stage.sweep()[0] == 1
        assert ids(stage.app) == staged[:1]
        assert [each.task_id for each in stage.pending()] == staged[1:]

    def test_messages_of_another_app_are_not_for_this_broker(self, stage: Stage):
        with closing(make_app(stage.alias)) as app:
            other = Stage(stage.alias, app)
            staged = stage.dies_after_commit(1), other.dies_after_commit(2)
            stage.pass_time()
            assert (stage.sweep()[0], ids(stage.app), ids(app)) == (1, staged[0], [])
            assert (other.sweep()[0], ids(stage.app), ids(app)) == (1, [], staged[1])

    def test_a_sweep_leaves_off_at_its_limit_or_time(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ):
        staged = stage.dies_after_commit(1, 2, 3)
        stage.pass_time()
        with monkeypatch.context() as patch:
            patch.setattr(stage.outbox, "BUDGET_SECONDS", -1)
            assert stage.sweep() == (0, 0)
        assert stage.sweep(limit=2) == (2, 0)
        assert ids(stage.app) == staged[:2]
        assert stage.sweep()[0] == 1
        assert ids(stage.app) == staged[2:]


class TestSweeping:
    @pytest.mark.parametrize("name", ["once", "once_unretained"])
    def test_one_that_has_run_before_it_is_deleted_is_not_sent_again(self, lite: Stage, name: str):
        with lite.dies_before_delete():
            lite.add(name, (7,))
        (task_id,) = ids(lite.app)
        assert lite.app.tasks[name].apply((7,), task_id=task_id).get() == 7
        lite.pass_time()
        lite.sweep()
        assert (ids(lite.app), lite.pending()) == ([], [])

    def test_a_message_that_it_sends_is_a_root_and_none_of_its_children(self, lite: Stage):
        (staged,) = lite.dies_after_commit(1)
        lite.pass_time()
        children: list[Any] = []

        def sweep_all(self: Any) -> Any:
            done = whole_sweep(lite.app)
            children.extend(self.request.children)
            return done

        sweeping = lite.app.task(name="sweeping", shared=False, bind=True)(sweep_all)
        assert sweeping.apply().get()["outbox_sent"] == 1
        ((headers, _, _),) = sent(lite.app)
        assert (headers["root_id"], children) == (staged, [])

    def test_formats_that_the_app_accepts_no_longer_are_not_read(self, lite: Stage):
        lite.app.conf.accept_content = ["json", "pickle"]
        with lite.atomic():
            accepted = lite.add("free", ({1, 2},), serializer="pickle")
        assert ids(lite.app) == [accepted]
        with lite.atomic():
            lite.add("free", ({1, 2},), serializer="pickle")
            lite.app.conf.accept_content = ["json"]
        (kept,) = lite.pending()
        assert kept.error.startswith("StoreMisconfigured: ")
        assert ids(lite.app) == []

    @pytest.mark.parametrize("vendor", LOCK_PATIENCE)
    def test_it_leaves_what_is_locked_to_the_next(
        self, use_database: Callable[..., str], vendor: str, caplog: pytest.LogCaptureFixture
    ):
        alias = use_database(vendor, options=LOCK_PATIENCE[vendor])
        other = connections.create_connection(alias)
        with closing(make_app(alias)) as app:
            stage = Stage(alias, app)
            staged = stage.dies_after_commit(1, 2)
            stage.pass_time()
            with closing(other), other.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE" if vendor == "sqlite" else "BEGIN")
                cursor.execute("UPDATE celery_idempotent_outbox SET attempts = attempts")
                assert stage.sweep() == (0, 0)
            (line,) = [text for text in caplog.messages if "left to" in text]
            assert "2 messages" in line
            assert "lock" in line.lower()
            assert stage.sweep()[0] == 2
            assert ids(app) == staged


class TestWhatIsKept:
    def test_delays_become_points_in_time_and_all_else_stays_as_it_was_staged(self, lite: Stage):
        before, extra = datetime.now(timezone.utc), ["as it was"]
        linked = lite.app.tasks["plain"].si()
        with lite.atomic():
            lite.add(
                "note",
                (1, extra),
                countdown=100,
                expires=200,
                priority=7,
                headers={"trace": "x"},
                link=linked,
                time_limit=30,
                shadow="a shadow",
                ignore_result=True,
            )
            extra.append("later")
        ((headers, body, properties),) = sent(lite.app)
        assert body[0] == [1, ["as it was"]]
        eta, expires = (datetime.fromisoformat(headers[name]) for name in ("eta", "expires"))
        assert timedelta(seconds=99) < eta - before < timedelta(seconds=110)
        assert timedelta(seconds=199) < expires - before < timedelta(seconds=210)
        assert (headers["trace"], headers["shadow"], headers["ignore_result"]) == (
            "x",
            "a shadow",
            True,
        )
        assert headers["timelimit"] == [30, None]
        assert properties["priority"] == 7
        assert body[2]["callbacks"][0]["options"]["task_id"]

    def test_the_expiry_of_the_task_itself_counts_from_the_staging(self, lite: Stage):
        lite.app.tasks["note"].expires = 50
        with lite.atomic():
            lite.add("note", (1,))
            lite.add("note", (2,), expires=None)
        (first, _, _), (second, _, _) = sent(lite.app)
        assert datetime.fromisoformat(first["expires"]) > datetime.now(timezone.utc)
        assert second["expires"] is None

    def test_an_overridden_apply_async_has_its_say_once(self, lite: Stage):
        task: Any = lite.app.tasks["note"]
        calls = []
        kind: Any = type(task)

        class Overriding(kind):  # type: ignore[misc]
            def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
                calls.append(args)
                result = super().apply_async(args, kwargs, priority=3, **options)
                assert result.id
                return result

        task.__class__ = Overriding
        with lite.atomic():
            lite.add("note", (1,))
        ((_, _, properties),) = sent(lite.app)
        assert (properties["priority"], calls) == (3, [(1,)])

    def test_a_signature_is_staged_that_is_one_message(self, lite: Stage):
        note, plain = lite.app.tasks["note"], lite.app.tasks["plain"]
        with lite.atomic():
            staged = [
                lite.add(plain.s(2).set(priority=3), (1,), link=note.si(1)),
                lite.add(chain(note.si(1), plain.si(2), note.si(3))),
            ]
            assert len(lite.pending()) == 2
        (one, body, properties), (_, chained, _) = sent(lite.app)
        assert (one["id"], body[0], properties["priority"]) == (staged[0], [1, 2], 3)
        assert body[2]["callbacks"][0]["options"]["task_id"]
        assert chained[2]["chain"][0]["options"]["task_id"] == staged[1]


class TestPublishOnce:
    def test_the_key_is_reserved_when_the_call_is_sent(self, lite: Stage):
        task: Any = lite.app.tasks["once"]
        first = task.apply_async((1,))
        with lite.atomic():
            lite.add("once", (1,))  # published before: it is not sent
            second = lite.add("once", (2,))
            assert task.idempotency_record(2) is None
            assert ids(lite.app) == [first.id]
        assert task.idempotency_record(2).task_id == second
        assert task.apply_async((2,)).id == second
        assert ids(lite.app) == [second]
        assert lite.pending() == []

    def test_one_that_the_caller_reserved_before_is_sent(self, lite: Stage):
        task: Any = lite.app.tasks["once"]
        identity = task.idempotency_definition().identifier.identity(1)
        store = get_store(lite.app)
        answer = store.reserve(
            ReserveRequest(identity=identity, task_id="mine", deadline_ms=60_000, keep_ms=60_000)
        )
        assert isinstance(answer, Reserved)
        with lite.atomic():
            lite.add("once", (1,), task_id="mine")
        assert ids(lite.app) == ["mine"]


CANVAS = r"A canvas \(.*cannot be staged"
#: Tasks, or canvases of more than one message, with arguments and options.
REFUSED: dict[str, tuple[Callable[[Any, Any], tuple[Any, ...]], dict[str, Any], str]] = {
    "large": (lambda *_: ("free", ("x" * 2**20,)), {}, "as json, and 1,048,576 are allowed"),
    "unserializable": (lambda *_: ("free", ({1},)), {}, "cannot be written as json"),
    "unaccepted": (lambda *_: ("free", (1,)), {"serializer": "pickle"}, "does not accept"),
    "connection": (lambda *_: ("free", (1,)), {"producer": object()}, "with producer"),
    "object": (lambda *_: ("free", (1,)), {"queue": object()}, "cannot be written"),
    "group": (lambda note, _: (group(note.si(1), note.si(2)),), {}, CANVAS),
    "chord": (lambda note, plain: (chord([note.si(1)], plain.si(2)),), {}, CANVAS),
    "led by a group": (
        lambda note, _: (chain(group(note.si(1), note.si(2)), note.si(3)),),
        {},
        CANVAS,
    ),
    "led by a plain task": (lambda note, plain: (chain(plain.si(1), note.si(2)),), {}, CANVAS),
    "map": (lambda note, _: (note.map([1, 2]),), {}, CANVAS),
    "chunks": (lambda note, _: (note.chunks([(1,), (2,)], 1),), {}, CANVAS),
}


class TestRefusals:
    def test_outside_of_a_transaction(self, lite: Stage):
        with pytest.raises(IdempotencyError, match="outside of a transaction"):
            lite.add("note", (1,))

    @pytest.mark.parametrize(
        ("store", "message"),
        [("django://another", "that of 'another'"), ("memory://", "no outbox")],
        ids=["another", "none"],
    )
    def test_where_nobody_would_sweep(self, lite: Stage, store: str, message: str):
        elsewhere = Stage(lite.alias, make_app(lite.alias, idempotency_store=store))
        with pytest.raises(StoreMisconfigured, match=message), lite.atomic():
            elsewhere.add("note", (1,))

    @pytest.mark.parametrize("case", REFUSED)
    def test_calls_that_cannot_be_kept(self, lite: Stage, case: str):
        tasks = lite.app.tasks
        make, options, message = REFUSED[case]
        with lite.atomic():
            with pytest.raises(IdempotencyError, match=message) as caught:
                lite.add(*make(tasks["note"], tasks["plain"]), **options)
            assert "xxx" not in str(caught.value)
        assert (lite.pending(), ids(lite.app)) == ([], [])


class TestOnCommit:
    def test_within_an_atomic_task_messages_are_staged_in_its_transaction(self, lite: Stage):
        found: list[Any] = []
        note: Any = lite.app.tasks["note"]

        def body(how: str) -> None:
            note.delay_on_commit(1, extra=how)
            note.apply_async_on_commit((2,), {"extra": how}, priority=3)
            found.extend(lite.pending())
            if how == "fails":
                raise ValueError

        task: Any = lite.app.task(
            name="work",
            shared=False,
            base=type(note).__mro__[1],
            idempotency_atomic=True,
        )(body)
        result = task.apply(("fails",))
        assert result.state == "FAILURE"
        assert len(found) == 2
        assert (ids(lite.app), lite.pending()) == ([], [])
        assert task.apply(("works",)).state == "SUCCESS"
        (first, body_1, _), (second, body_2, properties) = sent(lite.app)
        assert [first["id"], second["id"]] == [each.task_id for each in found[2:]]
        assert (body_1[:2], body_2[:2]) == ([[1], {"extra": "works"}], [[2], {"extra": "works"}])
        assert properties["priority"] == 3
        assert lite.pending() == []

    def test_what_fails_after_the_commit_is_logged_and_keeps_nothing_else_from_being_done(
        self, lite: Stage, caplog: pytest.LogCaptureFixture
    ):
        note: Any = lite.app.tasks["note"]
        done: list[str] = []

        def mail(address: str) -> None:
            raise OSError("the relay is away")

        def body(address: str) -> str:
            wait = partial(transaction.on_commit, using=lite.alias)
            wait(partial(done.append, "before"))
            wait(partial(mail, address))
            wait(partial(mail, address), robust=True)
            note.delay_on_commit(1)
            wait(partial(done.append, "after"))
            return "sold"

        task: Any = lite.app.task(
            name="work",
            shared=False,
            base=type(note).__mro__[1],
            idempotency_key="address",
            idempotency_atomic=True,
        )(body)
        result = task.apply(("joe@example.org",))
        assert (result.state, result.result) == ("SUCCESS", "sold")
        assert done == ["before", "after"]
        assert len(ids(lite.app)) == 1
        told = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 2
        for record in told:
            assert record.idempotency_outcome == "on_commit_failed"  # type: ignore[attr-defined]
            assert "joe@example.org" in record.idempotency_key  # type: ignore[attr-defined]
            assert "mail" in record.getMessage()
            assert "joe" not in record.getMessage()
            assert record.exc_info
            assert record.exc_info[0] is OSError
        assert task.apply(("joe@example.org",)).result == "sold"

    def test_everywhere_else_they_do_what_those_of_celery_do(
        self, lite: Stage, monkeypatch: pytest.MonkeyPatch
    ):
        waiting: list[Any] = []
        monkeypatch.setattr(transaction, "on_commit", waiting.append)
        note: Any = lite.app.tasks["note"]
        note.delay_on_commit(1)
        assert ids(lite.app) == []
        waiting[0]()
        assert len(ids(lite.app)) == 1


@pytest.mark.rabbitmq
class TestWithRabbitMQ:
    @pytest.fixture
    def proxy(self, rabbitmq_url: str) -> Iterator[Proxy]:
        parts = urlsplit(rabbitmq_url)
        with Proxy(parts.hostname or "127.0.0.1", parts.port or 5672) as proxy:
            yield proxy

    @pytest.fixture
    def rabbit(
        self,
        use_database: Callable[..., str],
        rabbitmq_url: str,
        rabbitmq_queue: str,
        proxy: Proxy,
    ) -> Iterator[Stage]:
        """An app that publishes through the proxy."""
        alias = use_database("sqlite")
        parts = urlsplit(rabbitmq_url)
        broken = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{proxy.port}"
        conf = {
            "task_default_queue": rabbitmq_queue,
            "broker_write_url": urlunsplit(parts._replace(netloc=broken)),
            "broker_read_url": rabbitmq_url,
            "broker_connection_timeout": 5,
        }
        with closing(make_app(alias, **conf)) as app:
            yield Stage(alias, app)
            kombu.pools.reset()

    def arrives(self, rabbit: Stage, *expected: str) -> None:
        found: list[str] = []

        def look() -> bool:
            found.extend(ids(rabbit.app))
            return len(found) >= len(expected)

        wait_for(look)
        assert found == list(expected)

    def test_a_message_that_the_broker_never_got_stays(self, rabbit: Stage, proxy: Proxy):
        with rabbit.atomic():
            first = rabbit.notes(1)
        self.arrives(rabbit, *first)
        # Written to the socket, and gone: without a confirmation nobody would know.
        proxy.lose_requests(b"a lost message", times=None)
        with rabbit.atomic():
            lost = rabbit.add("note", (2,), shadow="a lost message")
        (kept,) = rabbit.pending()
        assert (kept.task_id, kept.attempts) == (lost, 1)
        proxy.heal()
        rabbit.pass_time()
        assert rabbit.sweep()[0] == 1
        self.arrives(rabbit, lost)

    def test_messages_that_the_broker_refuses_stay_and_hold_up_no_other(self, rabbit: Stage):
        for number in range(4):
            with rabbit.atomic():
                rabbit.add("note", (number,), exchange="there-is-no-such", routing_key="x")
        assert all("NOT_FOUND" in each.error for each in rabbit.pending())
        rabbit.pass_time()
        good = rabbit.dies_after_commit(9)
        rabbit.pass_time()
        sent_now, failed = rabbit.sweep()
        assert sent_now == 1
        assert failed >= 4, "on a slow machine, one may be due again"
        self.arrives(rabbit, *good)


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:sec@ret@rabbit:5672//",
        "amqp://user:sec/ret@rabbit/vhost",
        "redis://:sec#?ret@redis:6379/0",
        "amqp://user:secret@rabbit//;amqp://user:secret@rabbit//",
    ],
)
def test_what_is_told_of_an_error_has_no_credentials(sql_databases: object, url: str):
    from celery_idempotent.django.outbox import error_text

    told = error_text(OSError(f"cannot reach {url} (twice), write to ops@example.com"))
    assert told.startswith("OSError: cannot reach ")
    assert told.endswith(" (twice), write to ops@example.com")
    assert "***@r" in told
    assert not any(secret in told for secret in ("user", "sec", "ret"))
