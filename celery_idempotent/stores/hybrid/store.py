"""A store that is the truth, and a cache that answers for the keys it has settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    Answer,
    ClaimRequest,
    Identity,
    Record,
    Reservation,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
)
from celery_idempotent.stores.base import Store, Transaction
from celery_idempotent.stores.forwarding import ForwardingStore
from celery_idempotent.stores.hybrid.cache import Cached, RedisCache, Ticket


class HybridStore(ForwardingStore):
    """Keeps the records in ``truth``, and answers for settled keys from ``cache`` where that is safe.

    The cache only ever says that a key *is* settled. It holds what was read from the truth after the commit, for no
    longer than the truth keeps it; every other answer, and every write, is the truth's. So a cache that is flushed,
    dead, slow, or back with old data costs speed and never a second effect. :meth:`forget` needs it, and a settle that
    lets a FAILED record end anew: they fail while the cache does not answer, because an entry might outlive the
    record. (:meth:`forget_mark` does without: what it forgets is never an answer.)

    Some questions about a settled key still go to the truth: with another fingerprint, for the very task that settled
    it as long as its callbacks are not known to be sent, and about what an operator or a sweep settled.
    """

    def __init__(self, cache: RedisCache, truth: Store) -> None:
        if not truth.supports_cache:
            raise InvalidOption(
                f"{truth!r} cannot stand behind a cache: it does not say for how long it keeps a"
                " record (the method `retained`). Use it alone, or django:// here"
            )
        super().__init__(truth)
        self.cache = cache
        self.truth = truth

    def __repr__(self) -> str:
        return f"<HybridStore: {self.cache!r} before {self.truth!r}>"

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if no live claim holds it; a settled one is answered by the cache."""
        found = self.cache.look(request.identity)
        if isinstance(found, Cached) and _serves(found.record, request):
            return Settled(found.record, found.age_ms)
        answer = self.truth.claim(request)
        self._update_cache(found, answer)
        return answer

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message; a settled one is answered by the cache."""
        found = self.cache.look(request.identity)
        if isinstance(found, Cached) and _serves(found.record, request):
            return Settled(found.record, found.age_ms)
        answer = self.truth.reserve(request)
        self._update_cache(found, answer)
        return answer

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state to the truth; then cache what is stored there.

        Raises:
            StoreUnavailable: where a FAILED record is to end anew, also if the cache does not answer.
        """
        if request.record.state.settled and not request.restore:
            identity = request.record.identity
            done = self._under_tombstone(
                identity,
                lambda: self.truth.settle(request),
                done="completed",
                again="empty the cache",
            )
        else:
            done = self.truth.settle(request)
        if done:
            # Not the value at hand: of a settle that is repeated, the first end stays.
            self.refresh(request.record.identity)
        return done

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent, in the truth first."""
        marked = self.truth.mark_delivered(identity, token=token)
        if marked:
            # Whoever reads it next caches it with the mark; a reading of before it comes too late for that.
            self.cache.drop(identity)
        return marked

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these.

        Raises:
            StoreUnavailable: also if the cache does not answer. Then repeat it: the record may be deleted already, but
                a copy may be left.
        """
        return self._under_tombstone(
            identity,
            lambda: self.truth.forget(identity, token=token, state=state),
            done="forgotten",
            again="forget it again",
        )

    def _under_tombstone(
        self, identity: Identity, change: Callable[[], bool], *, done: str, again: str
    ) -> bool:
        """Change a settled record of the truth while no copy of it is answered or made."""
        try:
            tombstone = self.cache.bury(identity)
        except (StoreUnavailable, StoreMisconfigured) as error:
            raise type(error)(
                f"nothing was {done}: a copy of the record may be in the cache. {error}"
            ) from error
        changed = change()
        if self.truth.joined():
            # When the transaction commits, and if, is unknown here: the tombstone stays for its full time.
            return changed
        try:
            # It may be lost by now, and a copy of the record in its place.
            self.cache.lift(identity, tombstone)
        except (StoreUnavailable, StoreMisconfigured) as error:
            raise type(error)(
                f"it was {done}, but a copy of the record may be left in the cache: {again}. {error}"
            ) from error
        return changed

    def forget_mark(self, identity: Identity, *, token: int) -> None:
        """Forget what a run without retention left, also without a cache that does not answer.

        Such a mark is never an answer: should a copy of it turn up, the next read forgets it again. A server that
        refuses writes alone would answer with the copy again and again: then this raises, as :meth:`forget` does.
        """
        try:
            self.forget(identity, token=token)
        except (StoreUnavailable, StoreMisconfigured):
            if not self.cache.breaker.open:
                raise
            self.truth.forget(identity, token=token)

    def refresh(self, identity: Identity) -> None:
        """Cache what the truth has committed, if that is an end state. Never raises for either store."""
        self._fill(identity, self.cache.ticket(identity))

    def without_cache(self) -> Store:
        """Return the truth."""
        return self.truth

    def close(self) -> None:
        """Close the connections of both."""
        self.cache.close()
        self.truth.close()

    def _update_cache(self, found: Cached | Ticket | None, answer: Answer | Reservation) -> None:
        """Bring the cache in line with what the truth answered, where they disagree."""
        match found:
            case Ticket() if isinstance(answer, Settled):
                self._fill(answer.record.identity, found)
            case Cached(record) if record != answer.record:
                # Should not be. If it is, what the truth says counts.
                self.cache.drop(record.identity)
                self.refresh(record.identity)

    def _fill(self, identity: Identity, ticket: Ticket | None) -> None:
        """Read the committed record, and cache it if nothing was forgotten since the ticket."""
        if ticket is None or self.truth.joined():
            return
        try:
            retained = self.truth.retained(identity)
        except (StoreUnavailable, StoreMisconfigured):
            return  # what the caller came for is done
        # A copy would not tell that an operator settled it.
        # Nor that a sweep did, whose FAILED the owner may still replace.
        if (
            retained is not None
            and not retained.record.settled_by_operator
            and not retained.record.swept
        ):
            self.cache.fill(identity, ticket, retained)

    @contextmanager
    def transaction(self, record: Record | None) -> Iterator[Transaction]:
        """Begin the truth's transaction; after its commit the cache learns what was committed."""
        with self.truth.transaction(record) as transaction:
            yield transaction
        # Only here is it committed. An exception, of the body or of the commit, passes by.
        if record is not None:
            self.refresh(record.identity)


def _serves(record: Record, request: ClaimRequest | ReserveRequest) -> bool:
    """May the cache answer this?"""
    if request.fingerprint is not None and record.fingerprint not in (None, request.fingerprint):
        return False
    return record.delivered or not request.task_id or record.task_id != request.task_id
