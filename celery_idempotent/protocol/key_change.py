"""A claim under two identities, while a deploy changes one to the other.

Old workers know an operation by its old identity alone, new workers by both. New workers claim the new identity and
then the old one, and settle both. So new and old workers exclude each other, in either order::

    old worker   claim O ──────────────────── run ─ settle O
    new worker     claim N ─ claim O: Held ─ release N, come back: Settled ─ replay

    new worker   claim N ─ claim O ──────────────── run ─ settle O ─ settle N
    old worker             claim O: Held ─ come back ───────────────── Settled ─ replay

Several operations that have keys of their own now may have shared one old key. So an old record with another
fingerprint belongs to another operation. While that holds the old key the call waits; then the record is ignored.

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

#: A reserved record that was claimed and is given back, because the old identity is taken, gets this deadline.
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
    """Return the answer to a claim under both identities, and the old record if that was claimed as well.

    ``answer`` is that to the claim of the new identity. If both are claimed, the answer has the steps of both records,
    and the larger number of crashes. If the old one is settled and the new one was reserved, ``settle`` gives the new
    one the same end state: a client may ask for the outcome under it.
    """
    if not isinstance(answer, Claimed):
        return answer, None
    record = answer.record
    match claim_old():
        case Claimed(old_record):
            steps = {**dict(record.steps), **dict(old_record.steps)}
            crashes = max(record.crashes, old_record.crashes)
            return Claimed(replace(record, crashes=crashes, steps=tuple(steps.items()))), old_record
        case Mismatched(old_record) if not _is_live(old_record, store):
            return answer, None
        case Mismatched(old_record):
            # Another operation holds the old key. If it fails, that key is free, and an old worker may run this call:
            # so this worker must not run it now.
            refusal: Answer = Held(old_record, left_ms=_ASK_AGAIN_MS)
        case Settled(old_record) as done if record.reserved:
            settle(record, old_record)
            return done, None
        case other:
            refusal = other
    # A reservation becomes QUEUED again, not deleted: the message of this call comes back.
    requeue_ms = _REQUEUE_MS if record.reserved else None
    store.release(record.identity, token=record.token, requeue_ms=requeue_ms)
    return refusal, None


def _is_live(record: Record, store: Store) -> bool:
    """Does a run hold this record, or a message that is on its way? Only an unfinished record has a deadline."""
    return record.deadline_ms is not None and store.now_ms() < record.deadline_ms


def is_other(old: Identified | None, record: Record) -> bool:
    """Does this record belong to another operation, which had the same key as the call by the ``old`` rules?

    Example: the key was ``customer``, and a deploy makes it ``(customer, month)``. The calls for May and for June had
    one key before; their fingerprints (of the arguments) differ, and so they are two operations.
    """
    if old is None or old.fingerprint is None or record.fingerprint is None:
        return False
    return old.fingerprint != record.fingerprint


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

    If the new identity is taken, its answer is returned. If only the old one is, by the same operation, then the
    reservation of the new one is given back, and the answer is that of the old one.
    """
    new, old = identified.identity, identified.old
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
    if old is None or not isinstance(answer, Reserved):
        return answer
    old_answer = store.reserve(
        replace(
            request,
            identity=old.identity,
            task_id=answer.record.task_id,
            fingerprint=old.fingerprint,
            message=None,  # the new record has it
        )
    )
    match old_answer:
        case Reserved():
            return answer
        case Mismatched():
            return answer  # another operation has the old key: the worker of this call waits for it
        case Held(record, left_ms) if not left_ms and record.state is State.PROCESSING:
            return answer  # the lease ran out: its worker never came back
    store.release(new, token=answer.record.token)
    return old_answer


def give_back(store: Store, identified: Identified, record: Record) -> None:
    """Release a reservation that was made by :func:`reserve`, and whose message is not sent.

    Nothing is raised if the store fails: the caller has an error of its own to raise, and the reservation ends anyway.
    """
    old = identified.old
    try:
        # The two identities are equal only if a stamp has the same key twice: anything may be in a message.
        if old is not None and old.identity != record.identity:
            found = store.get(old.identity)
            if found is not None and (found.state, found.task_id) == (State.QUEUED, record.task_id):
                store.release(found.identity, token=found.token)
        store.release(record.identity, token=record.token)
    except IdempotencyError as error:
        logger.warning(
            "idempotency: could not release the reservation of %s, its deadline will end it: %s",
            record.identity,
            error,
        )


def two_record_store(store: Store, old_record: Record) -> Store:
    """Return a store for the claim of two identities: what ends or renews the new claim does so to the old one, too."""
    return _TwoRecordStore(store, old_record)


class _TwoRecordStore(ForwardingStore):
    """Does these verbs to both records, and forwards every other one, which is for the new record alone.

    ::

        renew         both in one call; each counts as renewed only if the old one is
        settle        the old one; then the new one, if the old claim still held
        checkpoint    the same
        release       the old one; then the new one in any case, and its answer is returned
        transaction   begun for the new one, and settles that; then the old one; one COMMIT for both

    Why the old one first: the process may die between the two writes. An old worker reads the old record alone, and
    would run again what only the new record says is done. A transaction writes both or none, in any order.
    """

    def __init__(self, store: Store, old_record: Record) -> None:
        super().__init__(store)
        self._old_record = old_record

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Renew each of them, and the old claim in the same call."""
        longest = max(leases, key=lambda lease: lease.lease_ms)
        old_record = self._old_record
        old = replace(longest, identity=old_record.identity, token=old_record.token)
        *renewed, old_renewed = self.inner.renew([*leases, old])
        return [each and old_renewed for each in renewed]

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state to the old record, and then to the new one."""
        old_request = replace(request, record=self._old_record)
        return self.inner.settle(old_request) and self.inner.settle(request)

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the step to both: the next run may be that of an old worker, which reads the old record alone."""
        old, step = self._old_record, {"name": name, "value": value}
        add: Callable[..., bool] = self.inner.checkpoint
        return add(old.identity, token=old.token, **step) and add(identity, token=token, **step)

    def release(self, identity: Identity, *, token: int, requeue_ms: int | None = None) -> bool:
        """Give both back."""
        old = self._old_record
        self.inner.release(old.identity, token=old.token, requeue_ms=requeue_ms)
        return self.inner.release(identity, token=token, requeue_ms=requeue_ms)

    @contextmanager
    def transaction(self, record: Record | None) -> Iterator[Transaction]:
        """Begin a transaction that settles both."""
        with self.inner.transaction(record) as transaction:
            yield _TwoRecordTransaction(transaction, self._old_record)


class _TwoRecordTransaction:
    """The transaction of a run that has two claims: it settles both, and forwards everything else."""

    def __init__(self, transaction: Transaction, old_record: Record) -> None:
        self._transaction = transaction
        self._old_record = old_record

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state to both, to be committed together."""
        settle = self._transaction.settle
        return settle(request) and settle(replace(request, record=self._old_record))

    def passes(self, error: Exception) -> bool:
        """Forward to the transaction."""
        return self._transaction.passes(error)

    def has(self, connection: object) -> bool:
        """Forward to the transaction."""
        return self._transaction.has(connection)

    def guards(self, connection: object) -> bool:
        """Forward to the transaction."""
        return self._transaction.guards(connection)

    def outside(self) -> AbstractContextManager[None]:
        """Forward to the transaction."""
        return self._transaction.outside()
