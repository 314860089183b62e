"""The table of what each verb does with a record in each state, and how a store applies it.

The first rule for the verb and the state whose conditions all hold decides the answer and the record that is stored.
Example: a claim that finds a PROCESSING record skips the rule ``"another fingerprint"`` if the fingerprints agree, and
stops at ``"before its deadline"`` if that is to come: it answers ``held`` and writes nothing.

If another client writes between the look and the write, the store begins the verb again::

    worker A   look: none ─ decide: claimed ────────────── write: there is a record now ─ look: PROCESSING ─ held
    worker B      look: none ─ decide: claimed ─ write: done
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

from celery_idempotent import records
from celery_idempotent.records import Record, SettleRequest, State, Stored

Verb = Literal[
    "claim", "reserve", "replace", "start", "renew", "settle", "release", "take_back", "interrupt", "checkpoint",
    "mark_delivered", "requeue", "sweep", "forget",
]  # fmt: skip

QUEUED, PROCESSING, INTERRUPTED = State.QUEUED, State.PROCESSING, State.INTERRUPTED
COMPLETED = State.COMPLETED
NONE = (None,)
ENDS = tuple(state for state in State if state.is_final)
LIVE = tuple(state for state in State if not state.is_final)
ANY = (*LIVE, *ENDS)
#: The states that have a deadline.
LEASED = (QUEUED, PROCESSING)

#: The fields that the next claim or reservation of a key takes over.
HISTORY = ("created_ms", "crashes", "attempts", "fingerprint", "steps", "note", "copies")
#: And over the mark of another task.
MARK = ("copies",)
#: How many task ids of such copies a record keeps.
COPIES = 8
#: How long at least the end of a task is kept whose message was sent more than once.
COPIES_MS = 24 * 3_600_000
CLAIM = (*HISTORY, "reserved")


def _without(fields: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    return tuple(name for name in fields if name not in left_out)


UNCHANGED = _without(tuple(f.name for f in fields(Record)), "identity", "state", "deadline_ms")
WHOLE = _without(UNCHANGED, "updated_ms")
_UNFINISHED = ("worker", "on_stale", "message", "steps", "reserved", "uncommitted", "swept")
#: The fields of a claim that stay once it is settled; the settle brings the others.
OUTCOME = _without(WHOLE, *_UNFINISHED, "value", "replaced", "delivered", "copies", "error")
#: The fields that stay when a sweep ends a claim.
RUN = _without(WHOLE, "swept")
#: The fields that stay when an operator ends a claim: a new token refuses its run.
OPERATED = _without(RUN, "token", "note")
ENDED_BY_OPERATOR = _without(OUTCOME, "token", "note")
#: The fields that stay when an operator runs a failed call again; with its crashes it would be refused at once.
AGAIN = _without(OPERATED, "value", "replaced", "delivered", "crashes", "error")
#: The fields that stay when a reservation is repeated; its transaction may be committed by now.
SAME_RESERVATION = _without(UNCHANGED, "reserved", "uncommitted")


class Rule(NamedTuple):
    """A rule for a record that is ``found`` in one of these states (``None``: there is no record).

    ``then`` is the state of the record that is stored, ``None`` if nothing is written. ``carried`` are its fields from
    the record before; the verb brings the others, or they are empty: without ``token`` among them it gets a new one,
    without ``updated_ms`` it has changed now. ``crashes`` and ``attempts`` are added. The record lives for as long as
    the verb asks (``"anew"``), longer by the time until its deadline, or as long as before. ``resends``: its message is
    sent again, each time after twice as long. ``swept``: its owner may go on.
    """

    verb: Verb
    found: tuple[State | None, ...]
    when: str
    answer: str
    then: State | Literal["as asked", "deleted"] | None = None
    carried: tuple[str, ...] = ()
    crashes: int = 0
    attempts: int = 0
    life: Literal["anew", "longer", "same"] = "same"
    resends: bool = False
    swept: bool = False


def _lost(verb: Verb, *states: State, swept: str = "") -> tuple[Rule, ...]:
    """Return a verb's rules for a claim that is over; ``swept`` is the answer if a sweep settled it FAILED."""
    return (
        Rule(verb, NONE, "", "lost"),
        Rule(verb, ANY, "another token", "lost"),
        *([Rule(verb, (State.FAILED,), "swept", swept)] if swept else []),
        Rule(verb, states, "", "lost"),
    )


# fmt: off
TABLE: tuple[Rule, ...] = (
    Rule("claim", NONE, "", "claimed", PROCESSING, attempts=1, life="anew"),
    # A copy of its message comes after the end of its run.
    Rule("claim", ANY, "a copy of an earlier task", "settled"),
    Rule("claim", ENDS, "each runs, the mark of another task", "claimed", PROCESSING, MARK, attempts=1, life="anew"),
    Rule("claim", ANY, "another fingerprint", "mismatched"),
    Rule("claim", ENDS, "", "settled"),
    # Its answer was lost.
    Rule("claim", (PROCESSING,), "the same attempt", "claimed", PROCESSING, UNCHANGED, life="anew"),
    Rule("claim", (PROCESSING,), "before its deadline", "held"),
    Rule("claim", (PROCESSING,), "", "claimed", PROCESSING, CLAIM, crashes=1, attempts=1, life="anew"),
    Rule("claim", (QUEUED, INTERRUPTED), "", "claimed", PROCESSING, CLAIM, attempts=1, life="anew"),

    Rule("reserve", NONE, "", "reserved", QUEUED, life="anew"),
    Rule("reserve", ANY, "a copy of an earlier task", "settled"),
    Rule("reserve", ENDS, "each runs, the mark of another task", "reserved", QUEUED, MARK, life="anew"),
    Rule("reserve", ANY, "another fingerprint", "mismatched"),
    Rule("reserve", ENDS, "", "settled"),
    Rule("reserve", (PROCESSING,), "before its deadline", "held"),
    # Its worker never came back, and with early acks the message is gone, too: it goes out under the same task id.
    Rule("reserve", (PROCESSING,), "", "reserved", QUEUED, RUN, crashes=1, life="anew", resends=True, swept=True),
    # The answer to this reservation was lost, or the first sender publishes again.
    Rule("reserve", (QUEUED,), "the same task id, with a message", "reserved", QUEUED,
         _without(SAME_RESERVATION, "message"), life="anew"),
    Rule("reserve", (QUEUED,), "the same task id", "reserved", QUEUED, SAME_RESERVATION, life="anew"),
    Rule("reserve", (QUEUED,), "the same attempt", "reserved", QUEUED, SAME_RESERVATION, life="anew"),
    Rule("reserve", (QUEUED,), "before its deadline", "held"),
    # Its sender died before it published: the message goes out under the same task id.
    Rule("reserve", (QUEUED,), "", "reserved", QUEUED,
         (*HISTORY, "task_id", "worker", "on_stale", "message"), life="anew", resends=True),
    Rule("reserve", (INTERRUPTED,), "", "reserved", QUEUED, HISTORY, life="anew"),

    *_lost("renew", *ENDS, swept="renewed"),
    Rule("renew", (PROCESSING,), "", "renewed", PROCESSING, UNCHANGED, life="anew"),
    # A reservation has no lease, and a key that was given back stays so.
    Rule("renew", (QUEUED, INTERRUPTED), "not swept", "lost"),
    # The token decides: after a sweep nobody else has claimed the key.
    Rule("renew", (QUEUED, INTERRUPTED), "", "renewed", PROCESSING, RUN, life="anew"),

    # Flushed or evicted: the claim's own record is carried.
    Rule("settle", NONE, "may be restored", "settled", "as asked", OUTCOME, life="anew"),
    Rule("settle", NONE, "", "none"),
    Rule("settle", ANY, "another token", "lost"),
    # An operator replaces the end. The callbacks of a success are not sent again.
    Rule("settle", (State.FAILED,), "seen in this state", "settled", "as asked", ENDED_BY_OPERATOR, life="anew"),
    Rule("settle", (State.COMPLETED,), "seen in this state", "settled", "as asked",
         (*ENDED_BY_OPERATOR, "delivered"), life="anew"),
    # A run that a sweep gave up has come back.
    Rule("settle", (State.FAILED,), "swept, may be restored", "settled", "as asked", OUTCOME, life="anew"),
    Rule("settle", ENDS, "", "settled"),
    Rule("settle", LIVE, "another state", "lost"),
    Rule("settle", LIVE, "by an operator", "settled", "as asked", ENDED_BY_OPERATOR, life="anew"),
    Rule("settle", LIVE, "", "settled", "as asked", OUTCOME, life="anew"),

    *_lost("release", INTERRUPTED, *ENDS),
    Rule("release", LEASED, "a retry is announced", "requeued", QUEUED, RUN, life="longer"),
    Rule("release", LEASED, "has steps, by an operator", "interrupted", INTERRUPTED, OPERATED),
    Rule("release", LEASED, "has steps", "interrupted", INTERRUPTED, RUN),
    Rule("release", LEASED, "", "released", "deleted"),

    # A claim that was given up without an answer: it did not run.
    Rule("take_back", (None, QUEUED, INTERRUPTED, *ENDS), "", "lost"),
    Rule("take_back", (PROCESSING,), "another attempt", "lost"),
    Rule("take_back", (PROCESSING,), "a retry is announced", "requeued", QUEUED, RUN, life="longer"),
    Rule("take_back", (PROCESSING,), "was claimed before", "interrupted", INTERRUPTED, RUN),
    Rule("take_back", (PROCESSING,), "", "released", "deleted"),

    *_lost("interrupt", QUEUED, INTERRUPTED, *ENDS),
    Rule("interrupt", (PROCESSING,), "", "interrupted", INTERRUPTED, WHOLE, crashes=1),

    *_lost("checkpoint", *ENDS, swept="kept"),
    Rule("checkpoint", (QUEUED, INTERRUPTED), "not swept", "lost"),
    Rule("checkpoint", LIVE, "has this step", "kept"),
    *[
        Rule("checkpoint", (state,), "", "added", state, (*_without(UNCHANGED, "steps"), "deadline_ms"))
        for state in LIVE
    ],

    *_lost("mark_delivered", *LIVE),
    *[Rule("mark_delivered", (state,), "", "marked", state, _without(UNCHANGED, "delivered")) for state in ENDS],

    Rule("requeue", (None, QUEUED, State.COMPLETED), "", "none"),
    Rule("requeue", ANY, "another token", "none"),
    Rule("requeue", (PROCESSING, INTERRUPTED, State.FAILED), "another state", "none"),
    Rule("requeue", (PROCESSING, INTERRUPTED, State.FAILED), "has no message", "none"),
    Rule("requeue", (State.FAILED,), "", "requeued", QUEUED, AGAIN, life="longer", resends=True),
    Rule("requeue", (PROCESSING,), "before its deadline, no token given", "none"),
    Rule("requeue", (PROCESSING,), "", "requeued", QUEUED, OPERATED, crashes=1, life="longer", resends=True),
    Rule("requeue", (INTERRUPTED,), "", "requeued", QUEUED, OPERATED, life="longer", resends=True),

    Rule("sweep", (None, INTERRUPTED, *ENDS), "", "none"),
    Rule("sweep", LEASED, "before its deadline", "none"),
    Rule("sweep", (PROCESSING,), "requeue if stale, has a message", "requeued", QUEUED, RUN, crashes=1, life="longer",
         resends=True, swept=True),
    Rule("sweep", (PROCESSING,), "", "interrupted", INTERRUPTED, RUN, crashes=1, swept=True),
    # Left to the next reservation.
    Rule("sweep", (QUEUED,), "has no message", "none"),
    Rule("sweep", (QUEUED,), "", "requeued", QUEUED, UNCHANGED, life="longer", resends=True),

    # The newest call's arguments wait in place of the others'. The sender's token is over: it cannot give this back.
    Rule("replace", (None, PROCESSING, INTERRUPTED, *ENDS), "", "none"),
    Rule("replace", (QUEUED,), "another token", "none"),
    Rule("replace", (QUEUED,), "", "replaced", QUEUED,
         (*_without(UNCHANGED, "token", "message"), "deadline_ms")),

    # The message that waits in this place has started: the next call may wait there.
    Rule("start", (None, PROCESSING, INTERRUPTED, *ENDS), "", "none"),
    Rule("start", (QUEUED,), "another task", "none"),
    Rule("start", (QUEUED,), "another token", "none"),
    Rule("start", (QUEUED,), "", "started", "deleted"),

    Rule("forget", NONE, "", "none"),
    Rule("forget", ANY, "another token", "none"),
    Rule("forget", ANY, "another state", "none"),
    Rule("forget", ANY, "", "forgotten", "deleted"),
)
# fmt: on

# -- how a store applies it --

Fields = dict[str, Any]


class StoredRecord(NamedTuple):
    """A record with its store's own fields; ``attempt`` is the id of the claim or reservation that wrote it."""

    record: Record
    expires_ms: int
    attempt: bytes = b""
    requeues: int = 0


@dataclass(slots=True, repr=False, eq=False)
class VerbArguments:
    """The arguments of a verb, with the ``fields`` that it brings for the record, or the ``request`` that has them.

    ``delay_ms`` is the length of the lease, or the time until the deadline. ``claim`` replaces a record that was lost.
    """

    fields: Fields = field(default_factory=dict)
    attempt: bytes | None = None
    delay_ms: int | None = None
    keep_ms: int = 0
    token: int | None = None
    state: State | None = None
    restore: bool = True
    step: tuple[str, Stored] | None = None
    claim: Record | None = None
    each_runs: bool = False
    request: Any = None

    def brought(self) -> Fields:
        """Return the fields for the record; a duplicate's are not read, which takes as long as all its rules."""
        if self.request is None:
            return self.fields
        names, read = _READERS[type(self.request)]
        return {**self.fields, **dict(zip(names, read(self.request), strict=True))}


def arguments(request: Request) -> VerbArguments:
    """Return the arguments of a claim, a reservation or a settle."""
    args = VerbArguments({}, b"", None, request.keep_ms)
    args.request = request
    if isinstance(request, SettleRequest):
        claim, args.restore = request.record, request.restore
        args.token, args.claim = claim.token, claim
        args.state = None if request.restore else claim.state
        return args
    args.each_runs = request.each_runs
    if isinstance(request, records.ClaimRequest):
        args.attempt, args.delay_ms = request.attempt, request.lease_ms
    else:
        # Identifies the sender also where the record has another's task id.
        size, args.fields["reserved"] = records.ATTEMPT_BYTES, True
        args.attempt = hashlib.blake2b(request.task_id.encode(), digest_size=size).digest()
        args.delay_ms = request.deadline_ms
    return args


def _brought(request: type) -> dict[str, str]:
    # ``deadline_ms`` is a length of time in a request, and a point in time in a record.
    of_record = {each.name for each in fields(Record)} - {"deadline_ms"}
    paths = {each.name: each.name for each in fields(request) if each.name in of_record}
    return paths | ({"copies": "record.copies"} if request is SettleRequest else {})


#: The requests whose fields a record takes.
Request = records.ClaimRequest | records.ReserveRequest | SettleRequest
#: The fields that each brings, and where it has them.
BROUGHT = {request: _brought(request) for request in get_args(Request)}
#: Where a settle by the run itself has the fields of the end: some of its claim stay.
SETTLED = BROUGHT[SettleRequest] | {name: f"record.{name}" for name in OUTCOME}
_READERS = {
    request: (tuple(paths), attrgetter(*paths.values())) for request, paths in BROUGHT.items()
}


_BY_CLAIM = BROUGHT[records.ClaimRequest]
#: What a claim brings for the fields of a record from there on: all but a field that was added at the end.
_FIRST = (*takewhile(_BY_CLAIM.__contains__, UNCHANGED[UNCHANGED.index("fingerprint") :]),)
_OTHERS = (*(_BY_CLAIM.keys() - {"identity", *_FIRST}),)
_read_first = attrgetter(*_FIRST)


def first_claim(request: records.ClaimRequest, token: int, now_ms: int) -> Record:
    """Return the record of a claim that found none, as :func:`after` does.

    By position, which saves a tenth of a claim's instructions.
    """
    known = request.identity, PROCESSING, token, now_ms, now_ms, now_ms + request.lease_ms, 0, 1
    record = Record(*known, *_read_first(request))
    for name in _OTHERS:
        setattr(record, name, getattr(request, name))
    return record


def kept_ms(keep_ms: int, copies: Sequence[str]) -> int:
    """Return for how long an end is kept: of a message that was sent more than once, a copy may wait in a queue."""
    return max(keep_ms, COPIES_MS) if copies else keep_ms or 1


Condition = Callable[[Any, VerbArguments, int], bool]

#: The conditions of rules, on the stored record, the verb's arguments, and the time in ms.
_CONDITIONS: dict[str, Condition] = {
    # ``None`` is equal to any.
    "another fingerprint": lambda s, a, _: (
        len({s.record.fingerprint, a.request.fingerprint, None}) == 3
    ),
    "a copy of an earlier task": lambda s, a, _: (
        a.request.task_id in s.record.copies and a.request.task_id != s.record.task_id
    ),
    "each runs": lambda _, a, __: a.each_runs,
    # A replacement has the task id of what it replaces, and goes on.
    "the mark of another task": lambda s, a, _: (
        s.record.task_id != a.request.task_id
        and (s.record.state is State.FAILED or not s.record.replaced)
    ),
    "another token": lambda s, a, _: a.token not in (None, s.record.token),
    "another state": lambda s, a, _: a.state not in (None, s.record.state),
    "the same attempt": lambda s, a, _: s.attempt == a.attempt,
    "another attempt": lambda s, a, _: s.attempt != a.attempt,
    "was claimed before": lambda s, *_: s.record.attempts > 1,
    "another task": lambda s, a, _: s.record.task_id != a.fields["task_id"],
    "the same task id": lambda s, a, _: s.record.task_id == a.request.task_id,
    "with a message": lambda _, a, __: a.request.message is not None,
    # At that millisecond it is over.
    "before its deadline": lambda s, _, now_ms: (s.record.deadline_ms or 0) > now_ms,
    "no token given": lambda _, a, __: a.token is None,
    "seen in this state": lambda s, a, _: a.state is s.record.state,
    "not swept": lambda s, *_: not s.record.swept,
    "swept": lambda s, *_: s.record.swept,
    "may be restored": lambda _, a, __: a.restore,
    "a retry is announced": lambda s, a, _: (
        a.delay_ms is not None and (s.record.reserved or s.record.message is not None)
    ),
    "has steps": lambda s, *_: bool(s.record.steps),
    "by an operator": lambda _, a, __: bool(a.brought()["note"]),
    "has this step": lambda s, a, _: bool(a.step and a.step[0] in dict(s.record.steps)),
    "has no message": lambda s, *_: s.record.message is None,
    "has a message": lambda s, *_: s.record.message is not None,
    "requeue if stale": lambda s, *_: s.record.on_stale == "requeue",
}


def after(
    rule: Rule, stored: StoredRecord | None, args: VerbArguments, now_ms: int, token: int
) -> StoredRecord:
    """Return the record that a rule stores; ``token`` is that of a new claim or reservation."""
    old = args.claim if stored is None else stored.record
    brought = args.brought()
    fields: Fields = {**brought, "attempts": rule.attempts, "updated_ms": now_ms}
    delay_ms, keep_ms, carried = args.delay_ms or 0, args.keep_ms, rule.carried
    if rule.resends and stored is not None:
        delay_ms *= 2 ** min(stored.requeues, 10)  # usually a minute, at last 17 hours
    if rule.then != "as asked":
        fields["state"] = rule.then
    if rule.then in LEASED and "deadline_ms" not in carried:
        fields["deadline_ms"] = now_ms + delay_ms
    if "created_ms" not in carried:  # the first record of this key, or over a mark
        fields["created_ms"] = now_ms
    if carried:
        assert old is not None
        fields["identity"] = old.identity
        fields.update([(name, getattr(old, name)) for name in carried])
        fields["crashes"] = fields.get("crashes", 0) + rule.crashes
        if "attempts" in carried:
            fields["attempts"] += rule.attempts
        sent = (old.task_id,) if rule.resends else brought.get("copies", ())
        if rule.verb == "settle":
            sent = sent or old.copies  # a sweep may have sent one since the claim
            keep_ms = kept_ms(keep_ms, sent)
        if sent and (rule.resends or rule.verb == "settle" or "copies" in carried):
            fields["copies"] = (*dict.fromkeys((*old.copies, *sent)),)[-COPIES:]
        if rule.swept:
            fields["swept"] = True
        if args.step is not None:
            fields["steps"] = (*old.steps, args.step)
    if "token" not in carried:
        fields["token"] = token
        # ``None`` stands for any: then the one from before stays known.
        if fields["fingerprint"] is None:
            fields["fingerprint"] = brought.get("fingerprint")
    record = Record(**fields)
    expires_ms = now_ms + delay_ms + keep_ms
    if stored is None:
        return StoredRecord(record, expires_ms, args.attempt or b"")
    if rule.life != "anew":
        expires_ms = stored.expires_ms + (delay_ms if rule.life == "longer" else 0)
    attempt = stored.attempt if args.attempt is None else args.attempt
    is_same = "created_ms" in carried and rule.verb != "settle"  # the operation goes on
    requeues = stored.requeues + rule.resends if is_same else 0
    return StoredRecord(record, expires_ms, attempt, requeues)


_RULES: dict[tuple[Verb, State | None], list[tuple[Rule, list[Condition]]]] = {}
for _rule in TABLE:
    _conditions = [_CONDITIONS[each] for each in _rule.when.split(", ") if each]
    for _state in _rule.found:
        _RULES.setdefault((_rule.verb, _state), []).append((_rule, _conditions))


def decide(verb: Verb, stored: StoredRecord | None, args: VerbArguments, now_ms: int) -> Rule:
    """Return the verb's first rule whose conditions hold."""
    for rule, conditions in _RULES[verb, None if stored is None else stored.record.state]:
        for holds in conditions:
            if not holds(stored, args, now_ms):
                break
        else:
            return rule
    raise AssertionError(f"the table has no rule for {verb} {stored}")


class Snapshot(ABC):
    """The result of a look: the ``stored`` record unless it has expired, the time, the largest token known."""

    stored: StoredRecord | None
    now_us: int
    highest: int

    @abstractmethod
    def write(self, after: StoredRecord) -> None:
        """Store this record in place of the one that was found."""

    @abstractmethod
    def remove(self, *, forget: bool) -> None:
        """Delete the record that was found; unless it is to be forgotten, a trace may stay for a while."""
