"""A claim under two identities, while a deploy changes one to the other.

Old workers know an operation by its old identity alone, new workers by both. New workers claim the new identity and
then the old one, and settle both. So new and old workers exclude each other, in either order::

    before   claim O ──────────────────── run ─ settle O
    after      claim N ─ claim O: Held ─ release N, come back: Settled ─ replay

    after    claim N ─ claim O ──────────────── run ─ settle O ─ settle N
    before             claim O: Held ─ come back ───────────────── Settled ─ replay

An old record of other arguments (the old key stood for more than the new one does) is another operation. It is ignored
once that has ended.

A process may die between the two settles. Then the old identity is settled, and the new one is still claimed: a new
worker that takes it over finds the old one settled, and answers from that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.identity.identified import Identified
from celery_idempotent.records import (
    Answer,
    Claimed,
    Held,
    Identity,
    Mismatched,
    Record,
    Renewal,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.base import Store, Transaction
from celery_idempotent.stores.forwarding import ForwardingStore

logger = logging.getLogger(__name__)

#: A reservation that we claimed and give back, because the old identity was taken, is due again after this time.
_REQUEUE_MS = 60_000

#: A call that waits for another operation under its old key asks again after this time.
_ASK_AGAIN_MS = 1000


def claim_both(
    answer: Answer,
    claim_old: Callable[[], Answer],
    *,
    settle: Callable[[Record, Record], object],
    store: Store,
) -> tuple[Answer, Record | None]:
    """Return what a claim under both identities comes to, and the old record if that was claimed as well.

    ``answer`` is that of the new identity. What an earlier run left under the old one, crashes and steps, is taken
    over. Where the old one is settled, so is a reservation of the new one (``settle``): its outcome may be asked for.
    """
    if not isinstance(answer, Claimed):
        return answer, None
    record = answer.record
    match claim_old():
        case Claimed(old):
            steps = {**dict(record.steps), **dict(old.steps)}
            crashes = max(record.crashes, old.crashes)
            return Claimed(replace(record, crashes=crashes, steps=tuple(steps.items()))), old
        case Mismatched(old) if not _at_work(old, store):
            return answer, None
        case Mismatched(old):
            # Not now: should it fail, a worker of the old version would find the old identity free and run this call.
            refusal: Answer = Held(old, left_ms=_ASK_AGAIN_MS)
        case Settled(old) as done if record.reserved:
            settle(record, old)
            return done, None
        case other:
            refusal = other
    # Should it have been reserved, its message is still to come.
    requeue_ms = _REQUEUE_MS if record.reserved else None
    store.release(record.identity, token=record.token, requeue_ms=requeue_ms)
    return refusal, None


def _at_work(old: Record, store: Store) -> bool:
    """Is this a run at work, or about to begin? Only an unfinished record has a deadline."""
    return old.deadline_ms is not None and store.now_ms() < old.deadline_ms


def is_other(before: Identified | None, record: Record) -> bool:
    """Does this record belong to another operation, which has only the call's old key in common with it?

    Example: the key was ``customer``, and a deploy makes it ``(customer, month)``. The calls for May and for June had
    one key before; their fingerprints (of the arguments) differ, and so they are two operations.
    """
    if before is None or before.fingerprint is None or record.fingerprint is None:
        return False
    return before.fingerprint != record.fingerprint


def reserve(
    store: Store,
    identified: Identified,
    *,
    task_id: str,
    deadline_ms: int,
    keep_ms: int,
    message: bytes | None = None,
    uncommitted: bool = False,
) -> Reservation:
    """Reserve the identity of a call, and its old one while a deploy changes keys.

    If one of the two is taken, the answer is that of the one that is, and the other is given back.
    """
    new, before = identified.identity, identified.before
    request = ReserveRequest(
        identity=new,
        task_id=task_id,
        fingerprint=identified.fingerprint,
        deadline_ms=deadline_ms,
        keep_ms=keep_ms,
        message=message,
        uncommitted=uncommitted,
    )
    answer = store.reserve(request)
    if before is None or not isinstance(answer, Reserved):
        return answer
    old = store.reserve(
        replace(
            request,
            identity=before.identity,
            task_id=answer.record.task_id,
            fingerprint=before.fingerprint,
            message=None,  # one is enough
        )
    )
    match old:
        case Reserved() | Mismatched():
            return answer
        case Held(record, left_ms) if not left_ms and record.state is State.PROCESSING:
            return answer  # whose worker never came back
    store.release(new, token=answer.record.token)
    return old


def give_back(store: Store, identified: Identified, record: Record) -> None:
    """Release a reservation that was made by :func:`reserve`, and whose message is not sent.

    Nothing is raised if the store fails: the caller has an error of its own to raise, and the reservation ends anyway.
    """
    before = identified.before
    try:
        if before is not None and before.identity != record.identity:
            old = store.get(before.identity)
            if old is not None and (old.state, old.task_id) == (State.QUEUED, record.task_id):
                store.release(old.identity, token=old.token)
        store.release(record.identity, token=record.token)
    except IdempotencyError as error:
        logger.warning(
            "idempotency: could not release the reservation of %s, its deadline will end it: %s",
            record.identity,
            error,
        )


def both(store: Store, old: Record) -> Store:
    """Return a store for the claim of two identities: what the run does to its record is done to ``old`` as well."""
    return _Both(store, old)


class _Both(ForwardingStore):
    """Writes the old record first, and the new one only if the claim of the old one still holds.

    ::

        settle old ─┬─ True ──▶ settle new
                    └─ False ─▶ the claim is lost: nothing is written to the new one

    In the other order a worker that knows the old key alone might run what the new key says is done. Two verbs differ:
    a renewal asks for both in one round trip, and a transaction settles the new record first, for it was begun for
    that one.
    """

    def __init__(self, store: Store, old: Record) -> None:
        super().__init__(store)
        self._old = old

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Renew each of them, and the old claim."""
        longest = max(leases, key=lambda lease: lease.lease_ms)
        old = replace(longest, identity=self._old.identity, token=self._old.token)
        *renewed, old_renewed = self.inner.renew([*leases, old])
        return [each and old_renewed for each in renewed]

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state of both."""
        old = replace(request, record=self._old)
        return self.inner.settle(old) and self.inner.settle(request)

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the step to both: the next run may be one that knows the old identity alone."""
        old, step = self._old, {"name": name, "value": value}
        add: Callable[..., bool] = self.inner.checkpoint
        return add(old.identity, token=old.token, **step) and add(identity, token=token, **step)

    def release(self, identity: Identity, *, token: int, requeue_ms: int | None = None) -> bool:
        """Give both back."""
        old = self._old
        self.inner.release(old.identity, token=old.token, requeue_ms=requeue_ms)
        return self.inner.release(identity, token=token, requeue_ms=requeue_ms)

    @contextmanager
    def transaction(self, record: Record | None) -> Iterator[Transaction]:
        """Begin a transaction that settles both."""
        with self.inner.transaction(record) as transaction:
            yield _BothSettled(transaction, self._old)


class _BothSettled:
    """The transaction of a run that has two claims."""

    def __init__(self, transaction: Transaction, old: Record) -> None:
        self._transaction = transaction
        self._old = old

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state of both, to be committed together."""
        settle = self._transaction.settle
        return settle(request) and settle(replace(request, record=self._old))

    def passes(self, error: Exception) -> bool:
        """Ask that transaction."""
        return self._transaction.passes(error)

    def has(self, connection: object) -> bool:
        """Ask that transaction."""
        return self._transaction.has(connection)

    def guards(self, connection: object) -> bool:
        """Ask that transaction."""
        return self._transaction.guards(connection)

    def outside(self) -> AbstractContextManager[None]:
        """Refuse writes to that transaction's database."""
        return self._transaction.outside()
