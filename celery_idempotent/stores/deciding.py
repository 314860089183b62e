"""How a store decides: the table is compiled, and a verb looks, decides, writes if what was seen is still there.

A store says how it looks (:meth:`.base.Store._at`), and a look how it is written over (:class:`Look`). Where somebody
else writes between the look and the write, the store begins the verb again::

    worker A   look: none ─ decide: claimed ────────────── write: there is a record now ─ look: PROCESSING ─ held
    worker B      look: none ─ decide: claimed ─ write: done

A verb tries the conditions of the rules for the state that it found, in order, and builds the next record in one step::

    look:    QUEUED, token 7, attempts 1        asked: a claim, lease 60 s
    decide:  ("claim", QUEUED) -> CompiledRule  the only one: "claimed"
    after:   PROCESSING, token 8, attempts 2    created, crashes, steps and reservation as before
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from celery_idempotent.records import (
    ClaimRequest,
    Record,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.table import TABLE, Rule, Verb

#: Fields of a record by their names, each of a type of its own.
Fields = dict[str, Any]


class StoredRecord(NamedTuple):
    """A record, and what only its store knows: ``attempt`` is the id of the claim or reservation that wrote it."""

    record: Record
    expires_ms: int
    attempt: bytes = b""
    requeues: int = 0


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Asked:
    """What a verb is asked for.

    ``fields`` are those that it brings for the record. ``delay_ms`` is the length of the lease, or how far away the
    deadline is; a release without one gives the key back. ``claim`` is the record that is to be settled: where none is
    stored any more, its fields are carried over.
    """

    fields: Fields = field(default_factory=dict)
    attempt: bytes | None = None
    token: int | None = None
    state: State | None = None
    delay_ms: int | None = None
    keep_ms: int = 0
    restore: bool = True
    step: tuple[str, Stored] | None = None
    claim: Record | None = None


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


def _shared(request: type) -> tuple[Sequence[str], attrgetter[tuple[Any, ...]]]:
    # ``deadline_ms`` is a length of time in a request, and a point in time in a record.
    of_record = {each.name for each in fields(Record)} - {"deadline_ms"}
    names = [each.name for each in fields(request) if each.name in of_record]
    return names, attrgetter(*names)


#: Of each request the fields that a record takes as they are: those of the same name.
_SHARED = {request: _shared(request) for request in (ClaimRequest, ReserveRequest, SettleRequest)}


def brought(request: ClaimRequest | ReserveRequest | SettleRequest) -> Fields:
    """Return the fields that a request brings for the record."""
    names, read = _SHARED[type(request)]
    return dict(zip(names, read(request), strict=True))


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
    "another token": lambda s, asked, _: asked.token not in (None, s.record.token),
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
    "has steps, by an operator": lambda s, asked, _: bool(s.record.steps and asked.fields["note"]),
    "by an operator": lambda _, asked, __: bool(asked.fields["note"]),
    "has this step": lambda s, asked, _: (
        asked.step is not None and asked.step[0] in dict(s.record.steps)
    ),
    "has no message": lambda s, *_: s.record.message is None,
    "is requeued when stale": lambda s, *_: (
        s.record.on_stale == "requeue" and s.record.message is not None
    ),
}


class CompiledRule:
    """A rule, made ready: what it asks of the record before, and how it makes the next one."""

    def __init__(self, rule: Rule) -> None:
        self.answer: str = rule.answer
        self.deletes = rule.then == "deleted"
        self.writes = rule.then is not None and not self.deletes
        self.holds: Holds | None = _CONDITIONS[rule.when] if rule.when else None
        self._rule = rule
        self._read: attrgetter[Any] | None = attrgetter(*rule.carried) if rule.carried else None
        # What a rule does not carry over is made anew, if its next state has such a field.
        live = rule.then in (State.PROCESSING, State.QUEUED)
        self._adds_deadline = live and "deadline_ms" not in rule.carried
        self._adds_token = "token" not in rule.carried
        self._requeues = int(rule.verb in ("requeue", "sweep") and rule.then is State.QUEUED)
        self._changes: Fields = {"state": rule.then, "attempts": rule.attempts}
        if rule.then == "as asked":
            self._changes = {}

    def after(
        self, stored: StoredRecord | None, asked: Asked, now_ms: int, token: int
    ) -> StoredRecord:
        """Return what is stored next; ``token`` is what a new claim or reservation gets."""
        rule, old = self._rule, asked.claim if stored is None else stored.record
        fields: Fields = {**asked.fields, **self._changes, "updated_ms": now_ms}
        delay_ms = asked.delay_ms or 0
        if self._adds_deadline:
            fields["deadline_ms"] = now_ms + delay_ms
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
        expires_ms = now_ms + delay_ms + asked.keep_ms
        if stored is None:
            return StoredRecord(record, expires_ms, asked.attempt or b"")
        if rule.life != "anew":
            expires_ms = stored.expires_ms + (delay_ms if rule.life == "longer" else 0)
        attempt = stored.attempt if asked.attempt is None else asked.attempt
        return StoredRecord(record, expires_ms, attempt, stored.requeues + self._requeues)


_COMPILED: dict[Verb, dict[State | None, list[CompiledRule]]] = {}
for _rule in TABLE:
    for _state in _rule.found:
        _of_verb = _COMPILED.setdefault(_rule.verb, {})
        _of_verb.setdefault(_state, []).append(CompiledRule(_rule))


def decide(verb: Verb, stored: StoredRecord | None, asked: Asked, now_ms: int) -> CompiledRule:
    """Return the first rule of the verb that holds."""
    for rule in _COMPILED[verb][None if stored is None else stored.record.state]:
        if rule.holds is None or rule.holds(stored, asked, now_ms):
            return rule
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
