"""A run of the protocol without Celery: what its hooks are asked becomes the answer of ``Runner.execute``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.options import Policy
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import Identity, Record

IDENTITY = Identity(namespace="shop.charge", key="order-17")


@dataclass
class Ran:
    value: object


@dataclass
class Replay:
    record: Record
    age_ms: int


@dataclass
class Conflict:
    record: Record
    left_ms: int


@dataclass
class StoreFailed:
    error: Exception
    begun: bool = False


class Answered(Exception):
    """A hook that raises what becomes of the call."""

    def __init__(self, answer: Conflict | StoreFailed) -> None:
        super().__init__(answer)
        self.answer = answer


@dataclass(kw_only=True)
class Call:
    """What a run is about."""

    identity: Identity = IDENTITY
    task_id: str = "t1"
    keep_failure: bool = False
    control: tuple[type[Exception], ...] = ()


class CallRun(Run):
    """The run of a call."""

    replayed: Replay | None = None

    def __init__(self, runner: Runner, call: Call) -> None:
        self.name, self.policy, self.codec = runner.name, runner.policy, runner.codec
        self.sender, self.open_store = "sender", runner.store  # type: ignore[method-assign]
        self.identity, self.fingerprint = call.identity, None
        self.task_id, self.worker = call.task_id, "host:1"
        self.keeps_failure, self.control = call.keep_failure, call.control
        if self.policy.atomic:
            self.in_transaction = atomic.run_body

    def longest_wait_ms(self) -> int | None:
        return None

    def replay(self, record: Record, age_ms: int) -> object:
        self.replayed = Replay(record, age_ms)
        return None

    def conflict(self, record: Record, left_ms: int) -> NoReturn:
        raise Answered(Conflict(record, left_ms))

    def store_failed(self, error: Exception, *, begun: bool = False) -> NoReturn:
        raise Answered(StoreFailed(error, begun))


class Runner:
    """Runs calls of one task."""

    def __init__(self, store: Callable[[], Any], codec: Any, **policy: Any) -> None:
        self.name = "shop.charge"
        self.store, self.codec, self.policy = store, codec, Policy(**policy)

    def execute(
        self, call: Call, body: Callable[[], object]
    ) -> Ran | Replay | Conflict | StoreFailed:
        run = CallRun(self, call)
        try:
            value = execute(run, body)
        except Answered as answered:
            return answered.answer
        return run.replayed or Ran(value)
