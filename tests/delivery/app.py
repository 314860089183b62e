"""The app of deliveries and faults: what workers run and what tests publish, the same tasks idempotent and plain.

A worker finds its settings as JSON in the environment; a test makes its own app of the same settings with
:func:`make_app`. Every run notes its start and its end in the ledger. So do, in workers, the outcomes that the library
announces: they tell *when* something happened; how often a task ran is told by its body alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import (
    task_postrun,
    task_received,
    task_revoked,
    worker_init,
    worker_process_init,
    worker_ready,
)
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_idempotent import IdempotentTask, current_claim, signals
from celery_idempotent.protocol.lease import heartbeat
from tests.support.apps import configure, environment, hurry, wait_at, wanted
from tests.support.ledger import LEDGER_VARIABLE, Ledger

__all__ = ["Refused", "environment", "make_app"]


class Refused(Exception):
    """The bank will never accept this card."""


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Return an app with every task of the tests."""
    app = Celery("deliveries", set_as_current=False)
    configure(app, settings)
    _define(app)
    _define_faulty(app)
    if settings.get("exchanges"):
        _define_exchanges(app)
    return app


def _define_exchanges(app: Celery) -> None:
    """Have exchanges give a message to several queues: one of fanout, and one of topics that is bound twice."""
    name = app.conf.task_default_queue
    topic = Exchange(f"{name}.topic", "topic")
    app.conf.task_queues = [
        Broadcast(f"{name}.all"),
        Queue(f"{name}.a", topic, "order.#"),
        Queue(f"{name}.b", topic, "*.paid"),
    ]


def _define_faulty(app: Celery) -> None:
    """Define tasks for which it is no part of their operation how they go."""
    keyed = partial(app.task, bind=True, shared=False, idempotency_key="key")
    keyed = partial(keyed, idempotency_fingerprint=("key",))
    again: dict[str, Any] = {"retry_on_worker_lost": True, "default_retry_delay": 1}
    for name, options in {
        "work": {"default_retry_delay": 0.1},
        "early": {"acks_late": False},
        "sent_again": {"acks_late": True, **again},
        "sent_again_early": {"acks_late": False, **again},
    }.items():
        keyed(name=name, base=IdempotentTask, **options)(play)
    for function in (struck, calls):
        keyed(name=function.__name__, base=IdempotentTask)(function)
    keyed(name="struck_before", base=StruckBefore)(struck)
    app.task(name="hold", shared=False, bind=True, base=Task, ignore_result=True)(hold)


def _define(app: Celery) -> None:
    idempotent = partial(app.task, base=IdempotentTask, bind=True, shared=False)
    late = {"acks_late": True, "reject_on_worker_lost": True}
    plain = partial(app.task, base=Task, bind=True, shared=False, **late)

    # The same work: by its task id, by a key of its own, and without any protection.
    idempotent(name="guarded")(work)
    idempotent(name="keyed", idempotency_key="key")(work)
    plain(name="plain")(work)

    idempotent(name="guarded_early", acks_late=False)(work)
    refusing: dict[str, Any] = {"idempotency_permanent_errors": (Refused,)}
    idempotent(name="refused", idempotency_key="key", **refusing)(refused)
    kept = {**refusing, "idempotency_keep_message": True}
    idempotent(name="refused_once", idempotency_key="key", **kept)(refused_once)

    once: dict[str, Any] = {"idempotency_key": "key", "idempotency_publish_once": True}
    idempotent(name="once", **once)(work)
    idempotent(name="once_unretained", idempotency_retention=0, **once)(work)
    idempotent(name="once_kept", idempotency_keep_message=True, **once)(work)
    idempotent(name="once_or_raise", idempotency_on_duplicate="raise", **once)(work)
    until_start = {**once, "idempotency_publish_once": "until_start"}
    idempotent(name="until_start", **until_start)(work)
    idempotent(name="newest", idempotency_on_duplicate="replace", **until_start)(newest)
    idempotent(name="again", **until_start)(calling_itself)
    idempotent(name="once_retrying", max_retries=None, **once)(retrying)

    lost: dict[str, Any] = {"idempotency_key": "key", "idempotency_on_stale": "requeue"}
    idempotent(name="requeued", acks_late=False, **lost)(work)

    idempotent(name="appending")(appending)
    idempotent(name="looking", idempotency_key="key")(looking)
    app.task(name="awaited", base=Awaiting, shared=False, idempotency_key="key")(awaited)
    app.task(name="threads", base=Task, shared=False)(threads)
    app.task(name="echo", base=Task, shared=False)(echo)


# -- bodies ----------------------------------------------------------------------------------------------------------


def work(
    self: Any, key: str, seconds: float = 0.0, gate: str = "", mood: str = ""
) -> dict[str, Any]:
    """Take ``seconds``, and until the file ``gate`` exists, then do what the mood says; no two runs return the same."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    first = not mood or ledger.count("start", key) == 1
    time.sleep(seconds)
    wait_at(gate, 150)
    match mood:
        case "fails once" if first:
            raise ValueError(key)
        case "retries once" if first:
            raise self.retry()
        case "hangs once" if first:
            wait_at("/never")
        case "hangs deaf once" if first:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            wait_at("/never")
        case "kills":
            os.kill(os.getpid(), signal.SIGKILL)
    ledger.append(f"retries {self.request.retries}", key, self.request.id)
    ledger.append("end", key, self.request.id)
    return _answer(self)


def play(self: Any, key: str, how: str = "", gate: str = "") -> str:
    """Work, and say who did."""
    work(self, key, 0.0, gate and str(gate_path(gate)), how)
    return f"done by {self.request.id}"


class Striking:
    """A value that has the soft time limit strike while it is encoded for the n-th time: by us, then by Celery."""

    def __init__(self, strike_at: int) -> None:
        self.left = strike_at

    def __json__(self) -> str:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGUSR1)
        return "struck"


def struck(self: Any, key: str, strike_at: int) -> Any:
    Ledger.from_env().append("end", key, self.request.id)
    return Striking(strike_at)


class StruckBefore(IdempotentTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        Striking(args[1]).__json__()


def calls(self: Any, key: str, task: str, strike_at: int) -> str:
    try:
        self.app.tasks[task].apply((f"inner {key}", strike_at))
    except SoftTimeLimitExceeded:
        return "limited"
    return "not limited"


def hold(self: Any, gate: str) -> None:
    """Wait, as a task of Celery's own."""
    Ledger.from_env().append("held", gate)
    wait_at(gate and str(gate_path(gate)))


def gate_path(gate: str) -> Path:
    """Return the file whose existence opens a gate of this name."""
    return Path(os.environ[LEDGER_VARIABLE]).parent / f"gate-{gate}"


def newest(self: Any, key: str, number: int, gate: str = "", retries: int = 0) -> int:
    """Note the number of the call whose arguments it has."""
    Ledger.from_env().append("start", key, self.request.id)
    wait_at(gate)
    Ledger.from_env().append(f"number {number}", key, self.request.id)
    if self.request.retries < retries:
        raise self.retry(countdown=0.1)
    return number


def calling_itself(self: Any, key: str, times: int) -> list[bool | None]:
    """Call itself so many times, and return whether each call was a duplicate."""
    return [self.delay(key, 0).duplicate for _ in range(times)]


def refused(self: Any, key: str) -> None:
    """Fail for good."""
    Ledger.from_env().append("start", key, self.request.id)
    raise Refused(f"the card of {key} expired", 4)


def refused_once(self: Any, key: str) -> str:
    """Fail for good, but only the first time."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    if ledger.count("start", key) == 1:
        raise Refused("this number is blocked today")
    return key


def retrying(self: Any, key: str, times: int, countdown: float, limit: int) -> dict[str, Any]:
    """Ask for ``times`` retries, of which ``limit`` are allowed; take a moment to tidy up after asking."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    if self.request.retries < times:
        error = RuntimeError(f"{key} is not ready")
        try:
            raise self.retry(exc=error, countdown=countdown, max_retries=limit)
        finally:
            time.sleep(0.02)  # the retry is published by now, and may well be running
    ledger.append("end", key, self.request.id)
    return _answer(self)


def appending(self: Any, text: str) -> str:
    """Append the letter that says who was here."""
    return f"{text}!"


def looking(self: Any, key: str, gate: str) -> list[Any]:
    """Look at the current claim again and again while others do the same; return whose it was, each once."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    wait_at(gate)
    seen = []
    token = self.idempotency.token
    for _ in range(50):
        time.sleep(0)
        claim = current_claim()
        found = claim and [claim.key, claim.token == token, claim is self.idempotency]
        if found not in seen:
            seen.append(found)
    ledger.append("end", key, self.request.id)
    return seen


class Awaiting(IdempotentTask):
    """A base that runs the coroutine of its task on the pool's own loop: the claim is around it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from celery_aio_pool.pool import AsyncIOPool  # type: ignore[import-untyped]

        pool: Any = AsyncIOPool.singleton
        running = asyncio.run_coroutine_threadsafe(super().__call__(*args, **kwargs), pool.loop)
        return running.result()


async def awaited(key: str, gate: str) -> str:
    ledger = Ledger.from_env()
    ledger.append("start", key)
    while not Path(gate).exists():
        await asyncio.sleep(0.02)
    ledger.append("end", key)
    return uuid.uuid4().hex


def echo(value: Any) -> Any:
    """Return what was given."""
    return value


def threads() -> dict[str, Any]:
    """Say how many threads this process has; claims nothing."""
    return {"pid": os.getpid(), "threads": _threads()}


def _answer(task: Any) -> dict[str, Any]:
    return {
        "run": uuid.uuid4().hex,
        "pid": os.getpid(),
        "retries": task.request.retries,
        "threads": _threads(),
    }


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# -- what a worker process does when it imports this module ----------------------------------------------------------


def _note(outcome: str, *, event: signals.Event, **_: Any) -> None:
    key = "" if event.identity is None else event.identity.key
    Ledger.from_env().append(outcome, key, event.task_id)


def _note_messages() -> None:
    """Note each message that arrives, with what it is sent by, and that it is done with."""

    def received(request: Any, **_: Any) -> None:
        about = request._message.properties
        how = f"{about.get('delivery_mode')} {about.get('priority')} {request.content_type}"
        Ledger.from_env().append("received", how, request.id)

    def done(request: Any = None, task_id: str = "", **_: Any) -> None:
        Ledger.from_env().append("done", "", task_id or request.id)

    task_received.connect(received, weak=False)
    task_postrun.connect(done, weak=False)
    task_revoked.connect(done, weak=False)


def _claim_before_fork(**_: Any) -> None:
    """Let the main process have a claim, a heartbeat and a connection, and a lock that is held while it forks."""
    assert app is not None
    held = app.tasks["keyed"].apply(args=("before the fork",))
    assert held.get(disable_sync_subtasks=False)["threads"] == 2
    locked = threading.Event()

    def hold() -> None:
        with heartbeat._lock:
            locked.set()
            time.sleep(3)

    threading.Thread(target=hold, daemon=True).start()
    locked.wait()


def _serve_metrics(app: Celery, port: int) -> None:
    from prometheus_client import Gauge

    from celery_idempotent import metrics

    children = Gauge("children", "Processes of the pool that live.", multiprocess_mode="livesum")
    metrics.serve(app, port, addr="127.0.0.1")
    worker_process_init.connect(lambda **_: children.set(1), weak=False)


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
    if LEDGER_VARIABLE in os.environ:
        worker_ready.connect(hurry, weak=False)
        _note_messages()
        for _outcome, _signal in signals.OUTCOMES.items():
            _signal.connect(partial(_note, _outcome), weak=False)
    if port := _wanted.get("metrics_port"):
        _serve_metrics(app, port)
    if _wanted.get("claim_before_fork"):
        worker_init.connect(_claim_before_fork, weak=False)
