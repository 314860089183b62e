"""What the worker's main process does when a child of its pool is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore, Reject, Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request as CeleryRequest

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import losses, worker
from celery_idempotent.celery.losses import gone
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Identity, Record, SettleRequest, State
from celery_idempotent.signals import worker_name
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.support.records import claim_key
from tests.support.waiting import wait_for
from tests.support.workers import freeze


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, and is not waited for while the test runs."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_child_is_gone_once_it_is_dead_before_and_after_it_was_waited_for(child, monkeypatch):
    assert not gone(child.pid)
    freeze(child.pid)
    assert not gone(child.pid)
    assert not gone(os.getppid())
    assert not gone(1)  # of somebody else
    child.send_signal(signal.SIGKILL)
    wait_for(lambda: gone(child.pid), what="the death to be seen")
    # It was looked at, not taken from whoever waits for it.
    assert os.waitpid(child.pid, 0)[1] == signal.SIGKILL
    child.returncode = -signal.SIGKILL
    monkeypatch.delattr(worker.os, "waitid")  # then a process is asked for by a signal
    assert gone(child.pid)
    assert not gone(os.getppid())


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(name="work", base=IdempotentTask, shared=False, idempotency_key="key")
    def work(key: str) -> None: ...

    app.conf.idempotency_lease = 1
    work.idempotency_policy  # noqa: B018
    return app.tasks["work"]


@pytest.fixture
def make(app: Celery, task: Any) -> Callable[..., Any]:
    """Make a request as the consumer does, started in the child with this pid."""

    def make(
        pid: int | None, *, key: str = "k", task_id: str = "t1", of: Any = task, **headers: Any
    ) -> Any:
        from celery.worker.request import create_request_cls  # type: ignore[attr-defined]

        cls = create_request_cls(
            worker.Request, of, SimpleNamespace(apply_async=None), "here", None
        )
        about: Any = {"delivery_info": {}, "properties": {}, "headers": {}, "body": None}
        message = SimpleNamespace(answers=[], **about)
        made = cls(
            message,
            app=app,
            task=of,
            decoded=True,
            body=[[key], {}, {}],
            headers={"id": task_id, "task": "work", **headers},
            on_ack=lambda *_: message.answers.append("ack"),
            on_reject=lambda *_: message.answers.append("reject"),
        )
        if pid is not None:
            made.worker_pid = pid
            made.time_start = time.monotonic()
        made.answers = message.answers
        return made

    return make


def identity(key: str = "k") -> Identity:
    return Identity(namespace="work", key=key)


def hold(
    store: MemoryStore,
    task: Any,
    pid: int,
    *,
    key: str = "k",
    task_id: str = "t1",
    origin: str = "",
    **more: Any,
) -> Record:
    name = f"{worker_name(pid).partition('/')[0]}/{origin}" if origin else worker_name(pid)
    return claim_key(store, identity(key), task_id=task_id, worker=name, **more)


def undertakers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "idempotency-background"]


@pytest.fixture(autouse=True)
def _no_undertaker_left() -> Iterator[None]:
    yield
    wait_for(lambda: not undertakers(), 25, "every undertaker to end")


@pytest.fixture
def dead() -> int:
    """The pid of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def einfo(error: BaseException) -> Any:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


LOSSES = [
    WorkerLostError("signal 9"),
    Terminated(15),
    TimeLimitExceeded(5),
    pytest.param(
        SystemExit(1),
        marks=pytest.mark.skipif(
            celery.VERSION[:2] < (5, 7), reason="Celery before 5.7 cannot store it"
        ),
    ),
]


class TestLostChild:
    @pytest.mark.parametrize("error", LOSSES, ids=lambda error: type(error).__name__)
    def test_its_claim_is_interrupted_before_the_message_goes_back(
        self, make, store, task, dead, error
    ):
        hold(store, task, dead)
        lost = make(dead)
        lost._on_reject = lambda *_: lost.answers.append(store.get(identity()).state)
        lost.on_failure(einfo(error))
        record = store.get(identity())
        assert (record.state, record.crashes) == (State.INTERRUPTED, 1)
        assert set(lost.answers) <= {"ack", State.INTERRUPTED}

    def test_one_that_its_pool_did_not_miss_costs_a_redelivery_no_lease(
        self, app, store, task, dead
    ):
        """Two die at once, and the pool has not read yet that one of them had begun: it gives its task to another.

        the first   claims ── dies
        the pool              has heard nothing of a task ── gives it away, and tells nobody of a loss
        another                                              meets the claim: it is interrupted, the next copy runs
        """
        task.acks_late = True
        message = message_of(task, ("k",), {})
        hold(store, task, dead, task_id=message.headers["id"], lease_ms=300_000)
        (copy,) = deliver_message(task, message, redelivered=True).published
        record = store.get(identity())
        assert (record.state, record.crashes) == (State.INTERRUPTED, 1)
        assert deliver_message(task, copy, redelivered=True).state == "SUCCESS"

    def test_a_redelivery_leaves_alone_a_claim_of_another_worker_or_task(self, store, task, dead):
        message = message_of(task, ("k",), {})
        own = {"task_id": message.headers["id"], "lease_ms": 300_000}
        elsewhere = {**own, "worker": f"{worker_name(dead)}0"}
        other = {**own, "task_id": "other", "worker": worker_name(dead)}
        alive = {**own, "worker": worker_name(os.getppid())}
        for held in elsewhere, other, alive:
            before = claim_key(store, identity(), **held)
            deliver_message(task, message, redelivered=True)
            assert store.get(identity()) == before
            store.release(identity(), token=before.token)

    @pytest.mark.parametrize("error", [ValueError("x"), Ignore(), Reject("x", requeue=True)])
    def test_any_other_failure_is_no_loss(self, make, store, task, dead, error):
        before = hold(store, task, dead)
        make(dead).on_failure(einfo(error))
        assert store.get(identity()) == before

    def test_a_store_that_is_away_for_a_lease_is_logged_and_the_message_goes_back(
        self, make, store, task, dead, monkeypatch, caplog
    ):
        def away(identity: Identity) -> Any:
            raise StoreUnavailable("away")

        monkeypatch.setattr(store, "get", away)
        lost = make(dead)
        lost.on_failure(einfo(WorkerLostError()))
        assert lost.answers == ["reject"]
        wait_for(lambda: not undertakers(), what="the undertaker to give up")
        assert "could not interrupt work key k, its lease will end it: away" in caplog.text

    def test_a_message_that_cannot_be_read_is_logged_and_goes_back(
        self, make, store, task, dead, caplog
    ):
        lost = make(dead, idempotency="nonsense")
        lost.on_failure(einfo(WorkerLostError()))
        assert lost.answers == ["reject"]


class TestWhoseClaim:
    """Only the claim of this message in this child, never one of somebody else."""

    def lose(self, lost: Any) -> None:
        lost.on_failure(einfo(WorkerLostError()))
        wait_for(lambda: not undertakers(), what="the undertaker to end")

    @pytest.mark.parametrize(
        ("whose", "pid"),
        [
            ({}, 1),
            ({"origin": "another machine"}, 0),
            ({"task_id": "t2"}, 0),
            ({"key": "other"}, 0),
        ],
        ids=["process", "machine of the same name", "task id", "key"],
    )
    def test_of_another_stays(self, make, store, task, dead, whose, pid):
        before = hold(store, task, dead + pid, **whose)
        self.lose(make(dead))
        assert store.get(before.identity) == before

    def test_of_a_pid_that_was_given_out_again_stays(self, make, store, task, dead, monkeypatch):
        before = hold(store, task, dead)
        get = store.get

        def read(identity: Identity) -> Record | None:
            monkeypatch.setattr(losses, "gone", lambda _: False)
            found: Record | None = get(identity)
            return found

        monkeypatch.setattr(store, "get", read)
        self.lose(make(dead))
        assert get(identity()) == before

    @pytest.mark.parametrize("comes_back", [True, False])
    def test_whose_message_is_gone_is_left_to_the_sweep_that_sends_it_again(
        self, make, store, task, dead, comes_back
    ):
        task.reject_on_worker_lost = comes_back
        hold(store, task, dead, on_stale="requeue")
        self.lose(make(dead))
        state = State.INTERRUPTED if comes_back else State.PROCESSING
        assert store.get(identity()).state is state

    def test_a_settled_record_stays(self, make, store, task, dead):
        record = hold(store, task, dead)
        store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
        )
        self.lose(make(dead))
        assert store.get(identity()).state is State.COMPLETED

    @pytest.mark.parametrize(
        "pid", [None, os.getpid(), id(object())], ids=["never started", "threads", "greenlets"]
    )
    def test_a_request_without_a_child_asks_for_nothing(self, make, store, monkeypatch, pid):
        monkeypatch.setattr(store, "get", pytest.fail)
        make(pid).on_failure(einfo(WorkerLostError()))
        make(pid).on_timeout(soft=False, timeout=5)
        assert not undertakers()

    def test_a_store_that_minds_forks_is_left_to_the_lease(self, make, store, task, dead):
        """The pool forks the next child while a thread would be inside SQLite."""
        store.safe_beside_forks = False
        before = hold(store, task, dead)
        self.lose(make(dead))
        assert store.get(identity()) == before

    def test_the_stamp_of_the_message_tells_the_key(self, make, store, task, dead):
        hold(store, task, dead, key="stamped")
        stamp = {"id": "t1", "key": "stamped"}
        self.lose(make(dead, idempotency=stamp))
        assert store.get(identity("stamped")).state is State.INTERRUPTED


@pytest.mark.parametrize(
    ("mode", "rejects"), [("enforce", True), ("enforce", False), ("observe", True)]
)
def test_a_message_comes_back_for_its_callbacks_if_that_runs_nothing_again(
    app: Celery, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str, rejects: bool
) -> None:
    if not hasattr(CeleryRequest, "_success_was_stored"):
        pytest.skip("this Celery does not look for a stored success")

    @app.task(name="late", base=IdempotentTask, shared=False, idempotency_mode=mode, acks_late=True)
    def late(key: str) -> None: ...

    late.reject_on_worker_lost = rejects
    app.backend.store_result("t1", None, "SUCCESS")
    monkeypatch.setattr(worker, "callbacks_of", lambda _: (True,))
    stored = make(None, of=late)._success_was_stored()
    # A task that is only observed would run again.
    assert bool(stored) == (mode == "observe" or not rejects)
