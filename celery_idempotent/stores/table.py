"""What each verb does with a record: the table that the stores go by.

A verb looks at what is stored for a key, and the first rule for the state that it finds, and whose condition holds,
says what it answers and what is stored then. Example: a claim that finds a PROCESSING record skips the rule
``"another fingerprint"`` if the fingerprints agree, and stops at ``"within its lease"`` if that has not run out:
it answers ``held`` and writes nothing.

:mod:`celery_idempotent.stores.deciding` executes the table for the stores that decide in Python,
``tests/contract`` asks every store about each of its cells, Redis with its scripts included.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, NamedTuple

from celery_idempotent.records import Record, State

# fmt: off
Verb = Literal[
    "claim", "reserve", "renew", "settle", "release", "interrupt", "checkpoint", "mark_delivered", "requeue",
    "sweep", "forget",
]
# fmt: on

QUEUED, PROCESSING, INTERRUPTED = State.QUEUED, State.PROCESSING, State.INTERRUPTED
NONE = (None,)
ENDS = tuple(state for state in State if state.settled)
LIVE = tuple(state for state in State if not state.settled)
ANY = (*LIVE, *ENDS)

#: What the next claim or reservation of a key takes over.
HISTORY = ("created_ms", "crashes", "attempts", "fingerprint", "steps", "note")
CLAIM = (*HISTORY, "reserved")
#: All but the state, the deadline and the time of the last change.
WHOLE = tuple(
    field.name
    for field in fields(Record)
    if field.name not in ("identity", "state", "deadline_ms", "updated_ms")
)
#: All but the state and the deadline.
UNCHANGED = (*WHOLE, "updated_ms")


def _without(fields: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    return tuple(name for name in fields if name not in left_out)


#: What only an unfinished record has.
_UNFINISHED = ("worker", "on_stale", "message", "steps", "reserved", "uncommitted", "swept")
#: What stays of a claim once it is settled; the rest of a settled record comes with the settle.
OUTCOME = _without(WHOLE, *_UNFINISHED, "value", "replaced", "delivered")
#: What stays of a claim that a sweep ends, or that goes on after that.
RUN = _without(WHOLE, "swept")
#: What stays when an operator says how it goes on: the record gets a new token, which refuses whoever still runs.
OPERATED = _without(RUN, "token", "note")
ENDED_BY_OPERATOR = _without(OUTCOME, "token", "note")
#: What a reservation has when it is repeated; its transaction may be committed by now.
SAME_RESERVATION = _without(UNCHANGED, "reserved", "uncommitted")


class Rule(NamedTuple):
    """What a verb does with a record that is ``found`` in one of these states (``None``: there is no record).

    ``when`` names a condition on what is stored and asked for; :mod:`.deciding` has what each means.

    ``then`` is the state of what is stored afterwards: ``"as asked"`` for a settle, ``"deleted"`` for no record, and
    ``None`` where nothing is written. ``carried`` are the fields that it has from the record before; all others
    are as the verb brings them, or empty. Without ``token`` among them it gets a new token, and the verb's fingerprint
    if the record before had none. Without ``updated_ms`` it has changed now, and without ``deadline_ms`` a deadline
    counts from now.

    ``crashes`` and ``attempts`` are added to what is carried. The record lives for as long as the verb asks
    (``"anew"``), by as much longer as its deadline is away (``"longer"``), or for as long as before.
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


def _lost(verb: Verb, *states: State, swept: str = "") -> tuple[Rule, ...]:
    """Return the rules of a verb for a claim that is over: no record, another token, one of these states.

    ``swept`` is the answer about a record that a sweep settled FAILED: its run may still settle it anew.
    """
    return (
        Rule(verb, NONE, "", "lost"),
        Rule(verb, ANY, "another token", "lost"),
        *([Rule(verb, (State.FAILED,), "swept", swept)] if swept else []),
        Rule(verb, states, "", "lost"),
    )


# fmt: off
TABLE: tuple[Rule, ...] = (
    Rule("claim", NONE, "", "claimed", PROCESSING, attempts=1, life="anew"),
    Rule("claim", ANY, "another fingerprint", "mismatched"),
    Rule("claim", ENDS, "", "settled"),
    # The answer to this very claim was lost.
    Rule("claim", (PROCESSING,), "the same attempt", "claimed", PROCESSING, UNCHANGED, life="anew"),
    Rule("claim", (PROCESSING,), "within its lease", "held"),
    Rule("claim", (PROCESSING,), "", "claimed", PROCESSING, CLAIM, crashes=1, attempts=1, life="anew"),
    Rule("claim", (QUEUED, INTERRUPTED), "", "claimed", PROCESSING, CLAIM, attempts=1, life="anew"),

    Rule("reserve", NONE, "", "reserved", QUEUED, life="anew"),
    Rule("reserve", ANY, "another fingerprint", "mismatched"),
    Rule("reserve", ENDS, "", "settled"),
    Rule("reserve", (PROCESSING,), "", "held"),
    # The answer to this very reservation was lost, or the first sender publishes again.
    Rule("reserve", (QUEUED,), "the same task id, with a message", "reserved", QUEUED,
         _without(SAME_RESERVATION, "message"), life="anew"),
    Rule("reserve", (QUEUED,), "the same task id", "reserved", QUEUED, SAME_RESERVATION, life="anew"),
    Rule("reserve", (QUEUED,), "the same caller", "reserved", QUEUED, SAME_RESERVATION, life="anew"),
    Rule("reserve", (QUEUED,), "before its deadline", "held"),
    # Its sender died before it published: the message goes out under the same task id.
    Rule("reserve", (QUEUED,), "", "reserved", QUEUED,
         (*HISTORY, "task_id", "worker", "on_stale", "message"), life="anew"),
    Rule("reserve", (INTERRUPTED,), "", "reserved", QUEUED, HISTORY, life="anew"),

    *_lost("renew", *ENDS, swept="renewed"),
    Rule("renew", (PROCESSING,), "", "renewed", PROCESSING, UNCHANGED, life="anew"),
    # A reservation has no lease, and a key that was given back stays so.
    Rule("renew", (QUEUED, INTERRUPTED), "not swept", "lost"),
    # The token decides: a sweep came, and nobody has claimed the key since.
    Rule("renew", (QUEUED, INTERRUPTED), "", "renewed", PROCESSING, RUN, life="anew"),

    # Flushed or evicted: what is carried is the claim's own record.
    Rule("settle", NONE, "may be restored", "settled", "as asked", OUTCOME, life="anew"),
    Rule("settle", NONE, "", "none"),
    Rule("settle", ANY, "another token", "lost"),
    # An operator who saw it fail knows better.
    Rule("settle", (State.FAILED,), "seen as FAILED", "settled", "as asked", ENDED_BY_OPERATOR, life="anew"),
    # A run that a sweep gave up has come back.
    Rule("settle", (State.FAILED,), "swept, may be restored", "settled", "as asked", OUTCOME, life="anew"),
    Rule("settle", ENDS, "", "settled"),
    Rule("settle", LIVE, "another state", "lost"),
    Rule("settle", LIVE, "by an operator", "settled", "as asked", ENDED_BY_OPERATOR, life="anew"),
    Rule("settle", LIVE, "", "settled", "as asked", OUTCOME, life="anew"),

    *_lost("release", INTERRUPTED, *ENDS),
    Rule("release", (QUEUED, PROCESSING), "a retry is announced", "requeued", QUEUED, RUN, life="longer"),
    Rule("release", (QUEUED, PROCESSING), "has steps, by an operator", "interrupted", INTERRUPTED, OPERATED),
    Rule("release", (QUEUED, PROCESSING), "has steps", "interrupted", INTERRUPTED, RUN),
    Rule("release", (QUEUED, PROCESSING), "", "released", "deleted"),

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

    Rule("requeue", NONE, "", "none"),
    Rule("requeue", ANY, "another token", "none"),
    Rule("requeue", (QUEUED, *ENDS), "", "none"),
    Rule("requeue", (PROCESSING, INTERRUPTED), "has no message", "none"),
    Rule("requeue", (PROCESSING,), "within its lease, no token given", "none"),
    Rule("requeue", (PROCESSING,), "", "requeued", QUEUED, OPERATED, crashes=1, life="longer"),
    Rule("requeue", (INTERRUPTED,), "", "requeued", QUEUED, OPERATED, life="longer"),

    Rule("sweep", (None, INTERRUPTED, *ENDS), "", "none"),
    Rule("sweep", (PROCESSING,), "within its lease", "none"),
    Rule("sweep", (PROCESSING,), "is requeued when stale", "requeued", QUEUED, RUN, crashes=1, life="longer"),
    Rule("sweep", (PROCESSING,), "", "interrupted", INTERRUPTED, RUN, crashes=1),
    Rule("sweep", (QUEUED,), "before its deadline", "none"),
    # Left to the next reservation.
    Rule("sweep", (QUEUED,), "has no message", "none"),
    Rule("sweep", (QUEUED,), "", "requeued", QUEUED, UNCHANGED, life="longer"),

    Rule("forget", NONE, "", "none"),
    Rule("forget", ANY, "another token", "none"),
    Rule("forget", ANY, "another state", "none"),
    Rule("forget", ANY, "", "forgotten", "deleted"),
)
# fmt: on
