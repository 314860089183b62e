"""The verbs of a store that decides in Python, written once: look, decide, write if what was seen is still there.

A store says how it looks (:class:`DecidingStore`), and a look how it is written over (:class:`Look`). Where somebody
else writes between the look and the write, the store begins the verb again::

    worker A   look: none ─ decide: claimed ────────────── write: there is a record now ─ look: PROCESSING ─ held
    worker B      look: none ─ decide: claimed ─ write: done

The decision is in :mod:`.table`, which is compiled once, at import: a verb tries the conditions of the moves for the
state that it found, in order, and builds the next record in one step::

    look:    QUEUED, token 7, attempts 1        asked: a claim, lease 60 s
    decide:  ("claim", QUEUED) -> Move          the only one: "claimed"
    after:   PROCESSING, token 8, attempts 2    created, crashes, steps and reservation as before

A store that can do a verb in one statement overrides it, and is held to the same contract.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
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
    SweepReport,
)
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store
from celery_idempotent.stores.table import TABLE, Rule, Verb

__all__ = [
    "Asked",
    "DecidingStore",
    "Done",
    "Look",
    "StoredRecord",
    "Taken",
    "asked_by",
    "brought",
    "decide",
    "report",
]

T = TypeVar("T")

#: A deadline doubles no more often than that: from a minute to 17 hours.
_DOUBLINGS = 10

#: Fields of a record by their names, each of a type of its own.
Fields = dict[str, Any]


class StoredRecord(NamedTuple):
    """A record, and what only its store knows about it.

    ``attempt`` is the id of the claim or the reservation that wrote it.
    """

    record: Record
    expires_ms: int
    attempt: bytes = b""
    requeues: int = 0


@dataclass(slots=True, kw_only=True)
class Asked:
    """What a verb is asked for.

    ``fields`` are those that it brings for the record. ``delay_ms`` is the length of the lease, or how far away the
    deadline is; a release without one gives the key back. ``claim`` is
    the record that is to be settled: where none is stored any more, its fields are the ones that are carried over.
    """

    fields: Fields = field(default_factory=dict)  # by the names of a record's
    attempt: bytes | None = None
    token: int | None = None
    state: State | None = None
    delay_ms: int | None = None
    keep_ms: int = 0
    restore: bool = True
    step: tuple[str, Stored] | None = None
    claim: Record | None = None


#: Does a condition hold for what is stored (``None``: nothing), what is asked for, and now?
Holds = Callable[[Any, Asked, int], bool]


def _another_fingerprint(stored: StoredRecord, asked: Asked, _: int) -> bool:
    known, brought = stored.record.fingerprint, asked.fields["fingerprint"]
    return known is not None and brought is not None and known != brought


def _before_deadline(stored: StoredRecord, _: Asked, now_ms: int) -> bool:
    """At the very millisecond of its deadline a lease is over."""
    deadline_ms = stored.record.deadline_ms
    return deadline_ms is not None and deadline_ms > now_ms


def _same_task(stored: StoredRecord, asked: Asked, _: int) -> bool:
    return bool(stored.record.task_id == asked.fields["task_id"])


def _same_attempt(stored: StoredRecord, asked: Asked, _: int) -> bool:
    return stored.attempt == asked.attempt


_CONDITIONS: dict[str, Holds] = {
    "another fingerprint": _another_fingerprint,
    "another token": lambda s, asked, _: asked.token is not None and asked.token != s.record.token,
    "another state": lambda s, asked, _: asked.state not in (None, s.record.state),
    "the same attempt": _same_attempt,
    "the same task id, with a message": lambda s, asked, now: (
        asked.fields["message"] is not None and _same_task(s, asked, now)
    ),
    "the same task id": _same_task,
    "the same caller": _same_attempt,
    "within its lease": _before_deadline,
    "before its deadline": _before_deadline,
    "within its lease, no token given": lambda s, asked, now: (
        asked.token is None and _before_deadline(s, asked, now)
    ),
    "seen as FAILED": lambda _, asked, __: asked.state is State.FAILED,
    "not swept": lambda s, *_: not s.record.swept,
    "swept": lambda s, *_: s.record.swept,
    "swept, may be restored": lambda s, asked, _: s.record.swept and asked.restore,
    "may be restored": lambda _, asked, __: asked.restore,
    "a retry is announced": lambda s, asked, _: (
        asked.delay_ms is not None and (s.record.reserved or s.record.message is not None)
    ),
    "has steps": lambda s, *_: bool(s.record.steps),
    "has steps, by an operator": lambda s, asked, _: bool(
        s.record.steps and asked.fields.get("note")
    ),
    "by an operator": lambda _, asked, __: bool(asked.fields.get("note")),
    "has this step": lambda s, asked, _: (
        asked.step is not None and any(name == asked.step[0] for name, _ in s.record.steps)
    ),
    "has no message": lambda s, *_: s.record.message is None,
    "is requeued when stale": lambda s, *_: (
        s.record.on_stale == "requeue" and s.record.message is not None
    ),
}


class Move:
    """A rule, made ready: what it asks of the record before, and how it makes the next one."""

    def __init__(self, rule: Rule) -> None:
        self.answer: str = rule.answer
        self.deletes = rule.then == "deleted"
        self.writes = rule.then is not None and not self.deletes
        self.holds: Holds | None = _CONDITIONS[rule.when] if rule.when else None
        self._rule = rule
        self._read: Callable[[Record], Sequence[object]] | None = (
            attrgetter(*rule.carried) if rule.carried else None
        )
        # What a rule does not carry over is made anew, if its next state has such a field.
        live = rule.then in (State.PROCESSING, State.QUEUED)
        self._adds_deadline = live and "deadline_ms" not in rule.carried
        self._adds_token = "token" not in rule.carried
        self._requeues = int(rule.verb in ("requeue", "sweep") and rule.then is State.QUEUED)
        self._changes: Mapping[str, object] = (
            {"state": rule.then, "attempts": rule.attempts} if isinstance(rule.then, State) else {}
        )

    def after(
        self, stored: StoredRecord | None, asked: Asked, now_ms: int, token: int
    ) -> StoredRecord:
        """Return what is stored next; ``token`` is what a new claim or reservation gets."""
        rule, old = self._rule, asked.claim if stored is None else stored.record
        fields: Fields = {**asked.fields, **self._changes, "updated_ms": now_ms}
        if self._adds_deadline:
            assert asked.delay_ms is not None
            fields["deadline_ms"] = now_ms + asked.delay_ms
        if self._read is None:  # the first record of this key
            fields["created_ms"] = now_ms
        else:
            assert old is not None
            fields["identity"] = old.identity
            fields.update(zip(rule.carried, self._read(old), strict=True))
            fields["crashes"] += rule.crashes
            fields["attempts"] += rule.attempts
            if asked.step is not None:
                fields["steps"] = (*old.steps, asked.step)
        if self._adds_token:
            fields["token"] = token
            # None stands for any: what a caller does not say stays known from the caller before.
            if fields["fingerprint"] is None:
                fields["fingerprint"] = asked.fields.get("fingerprint")
        record = Record(**fields)
        if rule.life == "anew":
            expires_ms = now_ms + (asked.delay_ms or 0) + asked.keep_ms
        else:
            assert stored is not None
            expires_ms = stored.expires_ms
            if rule.life == "longer":
                assert asked.delay_ms is not None
                expires_ms += asked.delay_ms
        if stored is None:
            return StoredRecord(record, expires_ms, asked.attempt or b"")
        attempt = stored.attempt if asked.attempt is None else asked.attempt
        return StoredRecord(record, expires_ms, attempt, stored.requeues + self._requeues)


_MOVES: dict[Verb, dict[State | None, tuple[Move, ...]]] = {}
for _rule in TABLE:
    for _state in _rule.found:
        _of_verb = _MOVES.setdefault(_rule.verb, {})
        _of_verb[_state] = (*_of_verb.get(_state, ()), Move(_rule))


def decide(verb: Verb, stored: StoredRecord | None, asked: Asked, now_ms: int) -> Move:
    """Return the first move of the verb that holds."""
    for move in _MOVES[verb][None if stored is None else stored.record.state]:
        if move.holds is None or move.holds(stored, asked, now_ms):
            return move
    raise AssertionError(f"the table has no rule for {verb} {stored}")


class Look(ABC):
    """What one look found: what is ``stored`` unless it has expired, the store's time, the largest token known."""

    stored: StoredRecord | None
    now_us: int
    highest: int

    @abstractmethod
    def write(self, after: StoredRecord) -> None:
        """Store this instead of what the look found."""

    @abstractmethod
    def remove(self, *, forget: bool) -> None:
        """Delete what the look found; unless it is to be forgotten, a trace may stay for a while."""


class Done(NamedTuple):
    """What a verb did: its answer, as the table has it, and the record if one was written."""

    answer: str
    record: Record | None = None


#: The record of a key that was claimed or reserved, or why it cannot be had.
Taken: TypeAlias = Record | Held | Settled | Mismatched


class DecidingStore(Store):
    """A store that decides in Python."""

    @abstractmethod
    def _at(self, identity: Identity, verb: Callable[[Look], T]) -> T:
        """Look at a key and do a verb with that; both again if somebody else wrote in between."""

    def _check(self, asked: Asked) -> None:
        """Refuse, or replace, what this store cannot store of a claim or a reservation."""

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if nobody holds it."""
        asked = asked_by(request)
        self._check(asked)
        answer = self._take_key("claim", request.identity, asked)
        return Claimed(answer) if isinstance(answer, Record) else answer

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message that is about to be published."""
        asked = Asked(
            fields={**brought(request), "reserved": True},
            # Tells who reserves also where the record has another's task id.
            attempt=hashlib.blake2b(request.task_id.encode(), digest_size=ATTEMPT_BYTES).digest(),
            delay_ms=request.deadline_ms,
            keep_ms=request.keep_ms,
        )
        self._check(asked)
        answer = self._take_key("reserve", request.identity, asked)
        return Reserved(answer) if isinstance(answer, Record) else answer

    def _take_key(self, verb: Verb, identity: Identity, asked: Asked) -> Taken:
        """Claim or reserve a key; return its record then, or why it cannot be had."""
        return self._at(identity, lambda look: self._take(verb, look, asked))

    def _take(self, verb: Verb, look: Look, asked: Asked) -> Taken:
        now_ms = look.now_us // 1000
        move = decide(verb, look.stored, asked, now_ms)
        old = None if look.stored is None else look.stored.record
        if move.writes:
            after = _after(move, look, asked)
            look.write(after)
            return after.record
        assert old is not None
        match move.answer:
            case "held":
                return Held(old, left_ms=max((old.deadline_ms or 0) - now_ms, 0))
            case "settled":
                return Settled(old, age_ms=max(now_ms - old.updated_ms, 0))
        return Mismatched(old)

    def _ask(self, verb: Verb, identity: Identity, asked: Asked) -> Done:
        """Do what the table says about a key."""
        return self._at(identity, lambda look: self._do(verb, look, asked))

    def _do(self, verb: Verb, look: Look, asked: Asked) -> Done:
        move = decide(verb, look.stored, asked, look.now_us // 1000)
        if move.writes:
            after = _after(move, look, asked)
            look.write(after)
            return Done(move.answer, after.record)
        if move.deletes:
            look.remove(forget=verb == "forget")
        return Done(move.answer)

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        return [self._renew(each) for each in renewals]

    def _renew(self, each: Renewal) -> bool:
        asked = Asked(token=each.token, delay_ms=each.lease_ms, keep_ms=each.keep_ms)
        return self._ask("renew", each.identity, asked).answer == "renewed"

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, unless the key has another token by now."""
        identity = request.record.identity
        return self._ask("settle", identity, asked_to_settle(request)).answer == "settled"

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back."""
        asked = Asked(fields={"note": note}, token=token, delay_ms=requeue_ms)
        return self._ask("release", identity, asked).answer != "lost"

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        return self._ask("interrupt", identity, Asked(token=token)).record

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of a step."""
        asked = Asked(token=token, step=(name, value))
        return self._ask("checkpoint", identity, asked).answer != "lost"

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent."""
        asked = Asked(fields={"delivered": True}, token=token)
        return self._ask("mark_delivered", identity, asked).answer == "marked"

    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None, note: str = ""
    ) -> Record | None:
        """Make an unfinished record that has a message QUEUED."""
        asked = Asked(fields={"note": note}, attempt=b"", token=token, delay_ms=deadline_ms)
        return self._ask("requeue", identity, asked).record

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these."""
        asked = Asked(token=token, state=state)
        return self._ask("forget", identity, asked).answer == "forgotten"

    def _sweep(self, look: Look, requeue_ms: int) -> Record | None:
        """Interrupt or requeue a record that seemed stale; return it as it is then, ``None`` if nothing was done.

        Each time that a message is requeued the next deadline is twice as far away: 1 min, 2 min, 4 min … 17 h.
        """
        requeues = 0 if look.stored is None else look.stored.requeues
        delay_ms = requeue_ms * 2 ** min(requeues, _DOUBLINGS)
        return self._do(
            "sweep", look, Asked(fields={"swept": True}, attempt=b"", delay_ms=delay_ms)
        ).record

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        look = self._at(identity, lambda look: look)
        return None if look.stored is None else look.stored.record


def asked_by(request: ClaimRequest) -> Asked:
    """Return what a claim asks for."""
    return Asked(
        fields=brought(request),
        attempt=request.attempt,
        delay_ms=request.lease_ms,
        keep_ms=request.keep_ms,
    )


def asked_to_settle(request: SettleRequest) -> Asked:
    """Return what a settle asks for."""
    return Asked(
        fields=brought(request),
        attempt=b"",
        token=request.record.token,
        keep_ms=max(request.keep_ms, 1),
        state=None if request.restore else request.record.state,
        restore=request.restore,
        claim=request.record,
    )


def _shared(request: type[ClaimRequest | ReserveRequest | SettleRequest]) -> tuple[str, ...]:
    """Return the names of the fields that a record takes from a request as they are.

    Names that both have: a new column of the record needs no line here. ``deadline_ms`` is the exception: in a request
    it is a length of time, in a record a point in time.
    """
    of_record = {field.name for field in fields(Record)} - {"deadline_ms"}
    return tuple(field.name for field in fields(request) if field.name in of_record)


_SHARED = {
    request: (_shared(request), attrgetter(*_shared(request)))
    for request in (ClaimRequest, ReserveRequest, SettleRequest)
}


def brought(request: ClaimRequest | ReserveRequest | SettleRequest) -> Fields:
    """Return the fields that a request brings for the record."""
    names, read = _SHARED[type(request)]
    return dict(zip(names, read(request), strict=True))


def report(swept: Sequence[Record], *, more: bool) -> SweepReport:
    """Return what a sweep did."""
    return SweepReport(
        interrupted=tuple(r for r in swept if r.state is State.INTERRUPTED),
        requeued=tuple(r for r in swept if r.state is State.QUEUED),
        more=more,
    )


def _after(move: Move, look: Look, asked: Asked) -> StoredRecord:
    token = max(look.highest + 1, look.now_us)
    return move.after(look.stored, asked, look.now_us // 1000, token)
