"""The tasks whose options, retries and ends are what scenarios look at."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel

from tests.delivery.beside_tasks import wait_at
from tests.delivery.recorder import note


class Order(BaseModel):
    number: int
    note: str = ""


class Receipt(BaseModel):
    text: str


def register(app: Celery) -> None:
    """Define them on an app."""
    task = partial(app.task, shared=False)
    for name, options in _RETRYING.items():
        task(name=f"tests.{name}", bind=True, **options)(retries)
    for name, options in _AUTORETRYING.items():
        task(name=f"tests.{name}", bind=True, **options)(raises)
    for name, options in _WORKING.items():
        task(name=f"tests.{name}", bind=True, **options)(works)
    task(name="tests.ends", bind=True)(ends)
    task(name="tests.ends_late", bind=True, acks_late=True)(ends)
    task(name="tests.ends_early", bind=True, acks_late=False)(ends)
    # Celery's class takes these options for attributes that mean nothing to it.
    keyed: dict[str, Any] = {"idempotency_key": "key", "idempotency_on_conflict": "ignore"}
    task(name="tests.keyed", **keyed)(waits_once)
    task(name="tests.takes", pydantic=True)(takes)
    task(name="tests.maybe_takes", pydantic=True)(maybe_takes)


_RETRYING: dict[str, dict[str, Any]] = {
    "retries": {"default_retry_delay": 0.3},
    "retries_quietly": {"ignore_result": True, "default_retry_delay": 0.3},
}

_AUTORETRYING: dict[str, dict[str, Any]] = {
    "autoretries": {
        "autoretry_for": (KeyError,),
        "retry_kwargs": {"max_retries": 2, "countdown": 0.3},
    },
    "backs_off": {
        "autoretry_for": (KeyError,),
        "retry_backoff": 1,
        "retry_backoff_max": 1,
        "retry_jitter": False,
        "max_retries": 2,
    },
    "jitters": {
        "autoretry_for": (KeyError,),
        "retry_backoff": True,
        "retry_backoff_max": 1,
        "max_retries": 1,
    },
}

_WORKING: dict[str, dict[str, Any]] = {
    "works": {},
    "works_late": {"acks_late": True},
    "works_early": {"acks_late": False, "reject_on_worker_lost": False},
    "works_lost_late": {"acks_late": True, "reject_on_worker_lost": False},
    "works_unacked": {"acks_late": True, "acks_on_failure_or_timeout": False},
    "works_ignored": {"ignore_result": True},
    "works_softly": {"soft_time_limit": 1},
    "works_hard": {"time_limit": 1, "acks_late": False},
    "works_hard_late": {"time_limit": 1},
    "works_off": {"idempotency_mode": "off"},
}


def retries(self: Any, times: int, how: str = "", x: Any = None) -> Any:
    """Retry so many times, one way or another."""
    note("retries", self.request.retries, self.max_retries)
    if self.request.retries >= times:
        return [self.request.retries, x]
    if how == "exc":
        try:
            raise KeyError(times)
        except KeyError as error:
            raise self.retry(exc=error) from None
    if how == "args":
        raise self.retry(args=(times, how, "changed"), kwargs={})
    if how == "options":
        raise self.retry(priority=5, time_limit=77, headers={"by": "retry"})
    raise self.retry()


def raises(self: Any, error: str, times: int = 99) -> int:
    """Raise an error in the first so many runs."""
    note("run", self.request.retries)
    random.seed(0)  # of the jitter
    if self.request.retries < times:
        raise {"key": KeyError, "value": ValueError, "index": IndexError}[error](error)
    return int(self.request.retries)


def works(self: Any, how: str = "", *args: Any) -> Any:
    """Do as told."""
    note("how", how, self.request.retries)
    match how:
        case "sleeps":
            time.sleep(30)
        case "waits":
            wait_at(args[0])
        case "catches":
            try:
                time.sleep(30)
            except SoftTimeLimitExceeded:
                return "caught"
        case "dies" if (self.request.delivery_info or {}).get("redelivered"):
            return "came back"
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        case "value error":
            raise ValueError("unexpected")
        case "shows":
            info = self.request.delivery_info or {}
            return [self.request.id is not None, info.get("priority"), self.serializer]
    return how


def ends(self: Any, how: str) -> Any:
    """End with an exception that is not a failure."""
    info = self.request.delivery_info or {}
    note("redelivered", bool(info.get("redelivered")))
    if how == "ignore":
        raise Ignore("by hand")
    if how == "ignore stored":
        self.update_state(state="SUCCESS", meta="by hand")
        raise Ignore
    if how == "reject":
        raise Reject("by hand", requeue=False)
    if how == "requeue" and not info.get("redelivered"):
        raise Reject("once more", requeue=True)
    with contextlib.suppress(KeyError):
        return {"requeue": "received two times"}[how]
    return how


def waits_once(key: str, gate: str) -> str:
    note("keyed", key)
    wait_at(gate)
    return "done"


def takes(order: Order) -> Receipt:
    assert isinstance(order, Order)
    note("order", order.number)
    return Receipt(text=f"number {order.number}")


def maybe_takes(order: Order | None = None) -> Receipt | None:
    return None if order is None else Receipt(text=f"number {order.number}")
