"""A run of the protocol without Celery: what its hooks are asked becomes the answer of ``Runner.execute``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.claim import Claim
from celery_idempotent.protocol.options import Policy
from celery_idempotent.protocol.run import OnCommit, Run, execute, give_back
from celery_idempotent.records import Identity, Record
from celery_idempotent.stores import Store

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
    fingerprint: bytes | None = None
    task_id: str = "t1"
    worker: str = "host:1"
    message: bytes | None = None
    keep_failure: bool = False
    control: tuple[type[Exception], ...] = ()
    longest_wait_ms: int | None = None
    open_transactions: Callable[[Store], Sequence[OnCommit]] | None = None


class CallRun(Run):
    """The run of a call."""

    replayed: Replay | None = None

    def __init__(self, runner: Runner, call: Call) -> None:
        self.name, self.policy, self.codec = runner.name, runner.policy, runner.codec
        self.sender, self.open_store = "sender", runner.store  # type: ignore[method-assign]
        self.store = None  # type: ignore[assignment]
        self.call = call
        self.identity, self.fingerprint = call.identity, call.fingerprint
        self.task_id, self.worker, self.message = call.task_id, call.worker, call.message
        self.keeps_failure, self.control = call.keep_failure, call.control
        self.open_transactions = call.open_transactions
        if self.policy.atomic:
            self.in_transaction = atomic.run_body

    def longest_wait_ms(self) -> int | None:
        return self.call.longest_wait_ms

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

    def release(self, claim: Claim) -> None:
        """Give the key back from within the body."""
        assert isinstance(claim, Run)
        give_back(claim)
