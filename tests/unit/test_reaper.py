"""The sweep registers itself, once for each app, and leaves what the user set alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task
from celery.schedules import crontab

from celery_idempotent import IdempotentTask
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.errors import InvalidOption, ProcessingTimedOut, StoreUnavailable
from celery_idempotent.records import Identity, SettleRequest, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.records import claim_key


def make_app(store: Any = "memory://", **settings: Any) -> Celery:
    app = Celery("reaper", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, **settings)
    return app


def define(app: Celery, name: str = "work", **options: Any) -> Any:
    def work() -> None: ...

    return app.task(name=name, base=IdempotentTask, shared=False, **options)(work)


class TestRegistration:
    @pytest.mark.parametrize(
        ("interval", "seconds"), [(..., 30), (5, 5), (0.5, 0.5), (timedelta(minutes=2), 120)]
    )
    def test_an_idempotent_task_brings_the_sweep_and_its_schedule(self, interval, seconds):
        app = make_app(**{} if interval is ... else {"idempotency_sweep_interval": interval})
        define(app)
        app.finalize()
        entry = app.conf.beat_schedule[SWEEP]
        assert (entry["task"], entry["schedule"]) == (SWEEP, seconds)
        # A tick that nobody took is of no use once the next one is due.
        assert 0 < entry["options"]["expires"] <= max(seconds, 1)

    def test_an_app_without_idempotent_tasks_gets_nothing_until_it_has_one(self):
        app = make_app()
        app.task(name="plain", shared=False)(lambda_free)
        app.finalize()
        assert SWEEP not in app.tasks
        assert SWEEP not in app.conf.beat_schedule
        define(app)
        assert SWEEP in app.tasks
        assert SWEEP in app.conf.beat_schedule

    def test_every_app_has_its_own(self, recwarn):
        first, second = make_app(), make_app(idempotency_sweep_interval=5)
        define(first)
        define(second)
        sweep_of_first = first.tasks[SWEEP]
        assert sweep_of_first is not second.tasks[SWEEP]
        assert sweep_of_first.app is first
        define(first, "late")
        assert first.tasks[SWEEP] is sweep_of_first
        assert first.conf.beat_schedule[SWEEP]["schedule"] == 30
        assert second.conf.beat_schedule[SWEEP]["schedule"] == 5
        assert [str(w.message) for w in recwarn if "already registered" in str(w.message)] == []

    def test_it_is_a_plain_task_also_where_all_tasks_are_idempotent(self):
        app = Celery(
            "all",
            broker="memory://",
            backend="cache+memory://",
            task_cls="celery_idempotent:IdempotentTask",
            set_as_current=False,
        )
        app.conf.idempotency_store = "memory://"
        app.task(name="work", shared=False)(lambda_free)
        app.finalize()
        assert isinstance(app.tasks[SWEEP], Task)
        assert app.tasks[SWEEP].idempotency_definition() is None
        assert app.tasks[SWEEP].acks_late is False
        assert app.tasks[SWEEP].apply().get()["interrupted"] == 0


class TestSchedule:
    def test_an_entry_of_the_users_own_is_kept(self):
        mine = {"task": SWEEP, "schedule": crontab(minute="*/5"), "args": (100,)}
        other = {"other": {"task": "x", "schedule": 1}}
        app, without = make_app(beat_schedule={SWEEP: mine, **other}), make_app(beat_schedule=other)
        for each in (app, without):
            define(each)
            each.finalize()
        assert app.conf.beat_schedule == {SWEEP: mine, **other}
        assert without.conf.beat_schedule.keys() == {SWEEP, "other"}
        assert other.keys() == {"other"}

    @pytest.mark.parametrize("value", [0, 0.01, -1, "30", True, crontab(), float("nan")])
    def test_anything_else_is_refused_when_a_task_is_defined(self, value):
        app = make_app(idempotency_sweep_interval=value)
        with pytest.raises(InvalidOption, match=r"idempotency_sweep_interval .*None"):
            define(app).idempotency_policy  # noqa: B018


class TestSweep:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, clock: FakeClock) -> MemoryStore:
        return MemoryStore(clock)

    def hold(self, store: MemoryStore, key: str, lease_ms: int = 1000, **more: Any) -> Identity:
        identity = Identity(namespace="work", key=key)
        about = {"lease_ms": lease_ms, "keep_ms": 100_000, "task_id": "t", "worker": "host:1"}
        claim_key(store, identity, **about, **more)
        return identity

    def test_interrupts_what_is_stale_and_nothing_else(self, store, clock, caplog):
        stale, alive = self.hold(store, "stale"), self.hold(store, "alive", 10_000)
        clock.advance(1000)
        report = sweep(make_app(store))
        assert {k: report[k] for k in ("interrupted", "pruned", "more")} == {
            "interrupted": 1,
            "pruned": 0,
            "more": False,
        }
        assert store.get(stale).state is State.INTERRUPTED
        assert store.get(alive).state is State.PROCESSING
        assert "work key stale of t@host:1 is INTERRUPTED (crash 1): the lease ran out" in (
            caplog.text
        )

    def test_what_a_sweep_could_not_fail_is_failed_by_the_next_call(
        self, store, clock, monkeypatch
    ):
        app = make_app(store)
        task = define(app, idempotency_on_stale="fail")
        held = self.hold(store, "a", on_stale="fail")
        clock.advance(1000)

        def away(_: object) -> bool:
            raise StoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(store, "settle", away)
            with pytest.raises(StoreUnavailable):
                sweep(app)
        assert store.get(held).state is State.INTERRUPTED
        assert sweep(app)["failed"] == 0
        with pytest.raises(ProcessingTimedOut):
            task.apply(idempotency_key="a", throw=True)
        assert store.get(held).state is State.FAILED

    def test_the_owner_of_a_key_that_a_sweep_failed_completes_it_all_the_same(self, store, clock):
        record = store.get(self.hold(store, "late", on_stale="fail"))
        clock.advance(1000)
        assert sweep(make_app(store))["failed"] == 1
        end = SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=100_000)
        assert store.settle(end)
        assert store.get(record.identity).state is State.COMPLETED

    def test_a_key_that_was_claimed_and_released_meanwhile_is_not_failed(
        self, store, clock, monkeypatch
    ):
        self.hold(store, "kept", on_stale="fail")
        stale = self.hold(store, "stale", on_stale="fail")
        clock.advance(1000)
        swept = store.sweep

        def and_then(**asked: Any) -> Any:
            report = swept(**asked)
            self.hold(store, "stale")
            assert store.release(stale, token=store.get(stale).token)
            return report

        monkeypatch.setattr(store, "sweep", and_then)
        assert sweep(make_app(store))["failed"] == 1
        assert store.get(stale) is None


def lambda_free() -> None: ...
