"""The app of the policy tests: one task for each option, and hooks that count and break things from outside.

A worker finds its settings as JSON in the environment; a test makes its own app of the same settings with
:func:`make_app`. In a worker's main process every message that arrives is written down, to be delivered again as it is;
in its children every effect goes to the ledger, and a process kills itself at the point that a file names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from celery import Celery, Task, current_task
from celery.signals import (
    before_task_publish,
    task_postrun,
    task_prerun,
    task_received,
    task_revoked,
    task_success,
    worker_ready,
)

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.celery import publishing
from tests.support.apps import configure, hurry, wait_at, wanted
from tests.support.ledger import LEDGER_VARIABLE, Ledger, Lines

_OUTCOMES = (
    "claimed",
    "conflicted",
    "interrupted",
    "lease_lost",
    "mismatched",
    "replayed",
    "requeued",
    "reserved",
    "settle_failed",
    "store_failed",
)


class Refused(Exception):
    """The bank will never accept this card."""


def make_app(settings: Mapping[str, Any], *, prefix: str = "") -> Celery:
    """Return an app with every task of the tests."""
    app = Celery("policy_tests", set_as_current=False)
    settings = {
        name: timedelta(**value) if isinstance(value, dict) and name.startswith("idemp") else value
        for name, value in settings.items()
    }
    configure(app, settings, prefix)
    _define(app)
    return app


def _define(app: Celery) -> None:
    idempotent = partial(app.task, base=IdempotentTask, bind=True, shared=False)
    keyed = partial(idempotent, idempotency_key="key")
    plain = partial(app.task, base=Task, bind=True, shared=False)

    keyed(name="work")(work)

    once: dict[str, Any] = {"idempotency_publish_once": True}
    keyed(name="once", **once)(work)
    keyed(name="once_retrying", max_retries=3, **once)(retrying)

    stale: dict[str, Any] = {"idempotency_lease": 1}
    keyed(name="timing_out", idempotency_on_stale="fail", **stale)(work)
    requeue: dict[str, Any] = {"idempotency_on_stale": "requeue", **stale}
    keyed(name="requeued", acks_late=False, **requeue)(work)
    keyed(name="requeued_retrying", acks_late=False, **requeue)(retrying_soon_lost)

    keyed(name="open", idempotency_on_store_error="open")(work)
    keyed(name="observed", idempotency_mode="observe")(work)
    keyed(name="off", idempotency_mode="off")(work)

    keyed(name="scoped", idempotency_scope="tenant")(tenant)
    for colour in ("red", "blue"):
        keyed(name=colour, idempotency_namespace="colours")(work)
    keyed(name="by_name", idempotency_fingerprint=("values",))(echo_key)
    keyed(name="exclusive", idempotency_retention=0)(work)
    keyed(name="forgetful", idempotency_retention=1, idempotency_lease=0.5)(work)
    if app.conf.get("with_an_atomic_task"):
        keyed(name="atomic", idempotency_atomic=True, idempotency_on_store_error="closed")(work)
    keyed(name="unstored", idempotency_store_result=False, idempotency_lease=0.5)(work)

    saying = partial(app.task, base=Saying, bind=True, shared=False)
    saying(name="say")(say)
    saying(name="pay_once", idempotency_key="order")(pay_once)
    saying(name="refuse", **_permanent)(refuse)
    saying(name="item")(item)
    app.task(name="mourn", base=Saying, shared=False)(mourn)
    plain(name="plain_say")(say)
    plain(name="echo")(same)
    app.task(name="fence", base=Task, shared=False)(fence)

    keyed(name="purchase")(purchase)
    keyed(name="purchase_retrying", max_retries=2)(purchase_retrying)
    keyed(name="purchase_failing")(purchase_failing)


_permanent: dict[str, Any] = {"idempotency_permanent_errors": (Refused,)}


# -- bodies ----------------------------------------------------------------------------------------------------------


def work(self: Any, key: str, gate: str = "", seconds: float = 0.0) -> dict[str, Any]:
    """Take ``seconds``, and until the file ``gate`` exists; no two runs return the same."""
    _note("start", key)
    time.sleep(seconds)
    wait_at(gate)
    _note("end", key)
    return {"run": uuid.uuid4().hex}


def retrying(self: Any, key: str, *, countdown: float = 0.1) -> dict[str, Any]:
    """Ask for a retry."""
    _note("start", key)
    if self.request.retries < 1:
        raise self.retry(countdown=countdown)
    _note("end", key)
    return {"run": uuid.uuid4().hex}


def retrying_soon_lost(self: Any, key: str) -> dict[str, Any]:
    """Ask for a retry that counts as lost a second after it is due, not a minute."""
    global _label
    _label = key
    with mock.patch.object(publishing, "RESERVED_MS", 1000):
        return retrying(self, key, countdown=1)


def echo_key(self: Any, key: str, *values: Any, **named: Any) -> dict[str, Any]:
    """Say what arrived."""
    _note("start", key)
    return {"values": list(values), "named": named, "run": uuid.uuid4().hex}


def tenant(self: Any, key: str, tenant: str) -> dict[str, Any]:
    """Work for one tenant."""
    _note("start", key)
    return {"tenant": tenant, "run": uuid.uuid4().hex}


def fence() -> None:
    """Do nothing: whatever was sent before this has arrived."""


# -- canvas ----------------------------------------------------------------------------------------------------------


class Saying(IdempotentTask):
    """A task whose process may die in its own hook, after its callbacks were sent."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        crash("sent")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        crash("sent")


#: What this process is working on: the label of the last ``say``.
_label = ""


def say(self: Any, *given: Any) -> str:
    """Append the letter of the label to what was said before; the last argument is the label, ``key/letter``."""
    *before, label = given
    _begin(label)
    said = "".join("".join(each) if isinstance(each, list) else str(each) for each in before)
    return said + str(label).rsplit("/", 1)[1]


def same(self: Any, value: Any) -> Any:
    """Return what was given."""
    return value


def item(self: Any, label: str) -> str:
    """Do one item of a map."""
    _begin(label)
    return label.rsplit("/", 1)[1]


def pay_once(self: Any, order: str) -> str:
    """Pay an order; no two runs say the same."""
    _begin(order)
    return uuid.uuid4().hex


def refuse(self: Any, label: str) -> None:
    """Fail for good."""
    _begin(label)
    raise Refused(f"the card of {label} expired", 4)


def mourn(failed: str, *, label: str) -> None:
    """Note that a task failed."""
    _begin(label)


def _begin(label: str) -> None:
    global _label
    _label = label
    _note("effect", label)


# -- steps -----------------------------------------------------------------------------------------------------------


def purchase(self: Any, key: str) -> list[Any]:
    """Charge with one provider and ship with another."""
    return _purchase(self, key)


def purchase_retrying(self: Any, key: str) -> list[Any]:
    """As ``purchase``, with a retry between the two."""

    def between() -> None:
        if self.request.retries == 0:
            raise self.retry(countdown=0.1)

    return _purchase(self, key, between)


def purchase_failing(self: Any, key: str) -> list[Any]:
    """As ``purchase``, failing between the two the first time."""

    def between() -> None:
        if Ledger.from_env().count("between", key) == 1:
            raise RuntimeError("not today")

    return _purchase(self, key, between)


def _purchase(self: Any, key: str, between: Callable[[], None] = lambda: None) -> list[Any]:
    claim = self.idempotency

    def provider(name: str, amount: int) -> dict[str, Any]:
        _note(name, f"{key}:{claim.derived_key(name)}")
        return {"amount": amount, "receipt": uuid.uuid4().hex, "parts": (1, 2)}

    charged = claim.step("charge", provider, "charge", 10)
    _note("charged", f"{key}:{json.dumps(charged)}")
    _note("between", key)
    between()
    shipped = claim.step("ship", provider, "ship", amount=1)
    _note("shipped", f"{key}:{json.dumps(shipped)}")
    return [charged, shipped]


# -- counting and breaking -------------------------------------------------------------------------------------------


def _note(phase: str, key: str) -> None:
    task_id = getattr(getattr(current_task, "request", None), "id", "") or ""
    Ledger.from_env().append(phase, key, task_id)


def crash_file(ledger: Ledger, point: str, label: str) -> Path:
    """Return the file that lets one process die at ``point`` of the work on ``label``."""
    return ledger.path.parent / f"crash {point} {label.replace('/', '.')}"


def crash(point: str) -> None:
    """Take this process down, if a file says so, and only once."""
    with contextlib.suppress(FileNotFoundError):
        crash_file(Ledger.from_env(), point, _label).unlink()
        _note("crash", f"{point} {_label}")
        os.kill(os.getpid(), signal.SIGKILL)


def _receipts_of(ledger: Ledger) -> Path:
    return ledger.path.with_suffix(".receipts")


def receipts(ledger: Ledger) -> Lines[dict[str, Any]]:
    """Return what reads the messages that arrived at a worker, in order, as they were: a line each."""
    return Lines(_receipts_of(ledger), lambda line: line)


def _receive(request: Any = None, **_: Any) -> None:
    """Write down a message as it came from the broker."""
    message = request._message
    body = message.body
    receipt = {
        "name": request._type,
        "id": request.id,
        "headers": {k: v for k, v in message.headers.items() if k != "redelivered"},
        "body": body if isinstance(body, str) else bytes(body).decode(),
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "correlation_id": message.properties.get("correlation_id"),
        "reply_to": message.properties.get("reply_to"),
        "priority": message.properties.get("priority"),
        "delivery_mode": message.properties.get("delivery_mode"),
    }
    path = _receipts_of(Ledger.from_env())
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, json.dumps(receipt, default=str).encode() + b"\n")
    finally:
        os.close(fd)


def _announce(outcome: str, *, sender: Any, event: signals.Event, **_: Any) -> None:
    key = "" if event.identity is None else event.identity.key
    name = getattr(sender, "name", repr(sender))
    Ledger.from_env().append(
        f"observed {outcome}" if event.observed else outcome, key, event.task_id
    )
    if name != event.task and outcome != "requeued":
        Ledger.from_env().append("wrong sender", f"{outcome}: {name}", event.task_id)


def _publish(headers: Any, **_: Any) -> None:
    if headers.get("retries"):
        crash("publishing a retry")


def _watch() -> None:
    """Count and break in this process, and in those that it forks."""
    worker_ready.connect(hurry, weak=False)
    task_received.connect(_receive, weak=False)
    task_prerun.connect(
        lambda task_id, **_: Ledger.from_env().append("prerun", "", task_id), weak=False
    )
    task_postrun.connect(
        lambda task_id, state, **_: Ledger.from_env().append("postrun", state, task_id), weak=False
    )
    task_revoked.connect(
        lambda request, **_: Ledger.from_env().append("revoked", "", request.id), weak=False
    )
    # Connected after the library's own receivers, which have marked the record by then.
    task_success.connect(lambda **_: crash("delivered"), weak=False)
    for outcome in _OUTCOMES:
        getattr(signals, outcome).connect(partial(_announce, outcome), weak=False)
    signals.settled.connect(lambda **_: crash("settled"), weak=False)
    before_task_publish.connect(_publish, weak=False)


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"], prefix=_wanted["prefix"])
    if LEDGER_VARIABLE in os.environ:
        _watch()
