"""One signal an outcome, each sent with one frozen object: the seam for logging, metrics and tests.

A receiver takes ``sender`` (the task) and ``event`` (an :class:`Event`)::

    @replayed.connect
    def count(sender, event, **kwargs):
        print(event.task, event.identity.key, event.record.token)

Celery's signals swallow and log what a receiver raises, so a receiver never changes the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from celery.utils.dispatch import Signal

from celery_idempotent.records import Identity, Record, State

__all__ = [
    "Event",
    "claimed",
    "conflicted",
    "forgotten",
    "interrupted",
    "lease_lost",
    "mismatched",
    "released",
    "replayed",
    "requeued",
    "reserved",
    "settle_failed",
    "settled",
    "store_failed",
    "swept",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened: to which key, in which call of which task.

    ``task`` is the task's registered name (a view's name; the namespace, where no task of the app has it). ``record``
    is the record as far as it is known: the holder's in a conflict, the claim's in what a run writes. ``state`` is the
    state that was written, ``None`` if the record was deleted, or nothing was written. ``error`` is the exception
    behind a failure; ``count`` how many records a sweep interrupted; ``observed`` says that this is what would have
    happened, had ``idempotency_mode`` not been ``"observe"``. ``who`` did it: the operator whom an operation names,
    else the process (``hostname:pid/id``); ``reason`` is why, if a reason was given. ``seconds`` is how long it took:
    the store to answer the claim (``claimed``), to take the end state (``settled``; with the COMMIT of an atomic task),
    or how long a duplicate waited in its worker (``replayed``, ``conflicted``, ``mismatched``);
    ``None`` where nobody timed it.
    """

    task: str
    task_id: str = ""
    identity: Identity | None = None
    record: Record | None = None
    error: BaseException | None = None
    count: int = 0
    observed: bool = False
    who: str = ""
    reason: str = ""
    state: State | None = None
    seconds: float | None = None

    @property
    def namespace(self) -> str:
        """What the key is for; ``""`` for an event without a key. By default it is the task's name."""
        return "" if self.identity is None else self.identity.namespace


#: A key was reserved, and its message is published or staged (``idempotency_publish_once``, ``enqueue``).
reserved = Signal(name="idempotency_reserved")
#: This task has the key, and run() is about to start.
claimed = Signal(name="idempotency_claimed")
#: The first call answers this one: its stored result or exception, or its task id where it was published or queued.
replayed = Signal(name="idempotency_replayed")
#: Another call holds the key.
conflicted = Signal(name="idempotency_conflicted")
#: The key belongs to a call with other arguments.
mismatched = Signal(name="idempotency_mismatched")
#: The end state was written.
settled = Signal(name="idempotency_settled")
#: The key was given back after a failure, or before a retry.
released = Signal(name="idempotency_released")
#: A crash took the owner: noticed by the worker's main process, or by a sweep (in the sweeping process).
interrupted = Signal(name="idempotency_interrupted")
#: A newer claim exists: the result of this run is dropped.
lease_lost = Signal(name="idempotency_lease_lost")
#: A stale record's message was published again: by a sweep, or by an operator.
requeued = Signal(name="idempotency_requeued")
#: A record was deleted, by an operator, by code, or by a request that tries a failure again: the next call runs.
forgotten = Signal(name="idempotency_forgotten")
#: A sweep is done; ``event.count`` records were interrupted.
swept = Signal(name="idempotency_swept")
#: run() returned, but its result could not be recorded within a lease.
settle_failed = Signal(name="idempotency_settle_failed")
#: The store did not answer. Nothing ran, or an atomic run was rolled back: the message goes back.
store_failed = Signal(name="idempotency_store_failed")
