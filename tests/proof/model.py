"""A model of a key, explored whole: workers, publishers, an operator and faults around the table of the stores.

What a store does is computed by `Store`'s own verbs over `decide` and `after` of `stores/table.py`: checked is the
table, not a second description of it. What the outside may rely on is noted beside it, from the answers alone, and
compared after each step. Example of a world, and of one of its next::

    record   PROCESSING, token 2, lease over       worker A  runs with token 2 (frozen: it takes no step)
    noted    token 2 holds, no live lease          worker B  idle
    B claims ─▶ claimed: token 4, one crash        noted: token 4 holds; a settle with token 2 must be refused now

Time passes in ticks and is relative, tokens are ranks, workers are alike: the worlds are finite, and all are visited.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from celery_idempotent import records
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.table import Snapshot, StoredRecord
from tests.proof import Options, Row, say

# A run whose message was sent twice asks for a day anyway, which is 1,440 ticks of this clock.
table.COPIES_MS = 0

KEY = Identity(namespace="proof", key="order-17")
TICK = 60_000
#: Lives end half a tick beside every moment that is reached: Redis looks at its own clock for them.
HALF = TICK // 2
#: How long an unfinished record outlives its lease, and a settled one its end.
KEEP, RETENTION = 2 * TICK + HALF, TICK + HALF
#: More crashes than a key may have; its next claim settles it FAILED.
CAP = 1
_MOST_CRASHES = CAP + 1
#: By task: `x` has other arguments than `a` and `b`, `n` does not say.
FINGERPRINTS = {"a": bytes(16), "b": bytes(16), "x": b"x" * 16, "n": None}
NOTE = "complete by alice: the bank has it"
#: How a run settles its own claim.
OWN = ("C1", "C2", "F")


class Broken(Exception):
    """What a step did that is not promised."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Who takes part, and what can happen: each scope is explored whole."""

    name: str
    workers: int = 2
    keys: int = 1
    tasks: str = "ab"
    #: Answers of the store are lost; requests are carried out late.
    lost: bool = False
    steps: bool = False
    permanent: bool = False
    message: bool = False
    on_stale: str = "interrupt"
    each_runs: bool = False
    reserves: bool = False
    operator: bool = False
    #: `"flush"`, `"failover"`, `"step back"`: so many times together.
    faults: tuple[str, ...] = ()
    most_faults: int = 0

    @property
    def retention(self) -> int:
        return HALF if self.each_runs else RETENTION

    @property
    def policy(self) -> Scope:
        """What a call has of it: the options of the task."""
        names = "message", "on_stale", "each_runs"
        return replace(ANY, **{name: getattr(self, name) for name in names})


ANY = Scope(name="")


class Call(NamedTuple):
    """A question to a store. Tokens are those of the model; ``claim`` is the record that a settle was granted."""

    verb: str
    task: str = ""
    #: Of a claim or a take-back: is the attempt that of the claim which runs?
    same: bool = False
    token: int | None = None
    how: str = ""
    claim: int = 0
    #: The options that a claim, a reservation or a settle brings.
    scope: Scope = ANY


class TableStore(Store):
    """One key, by the table alone; ``now_us`` is its clock."""

    stored: StoredRecord | None = None
    highest = now_us = 0

    def _at(self, identity: Identity, verb: Any) -> Any:
        if self.stored is not None and self.stored.expires_ms <= self.now_us // 1000:
            self.stored = None
        return verb(_Look(self))

    def _due(self, limit: int) -> Any:
        return [KEY]  # whether it is due is for the table to say

    # Of many records, which there are not.
    stats = list = prune = None  # type: ignore[assignment]


class _Look(Snapshot):
    def __init__(self, store: TableStore) -> None:
        self._store, self.stored = store, store.stored
        self.now_us, self.highest = store.now_us, store.highest

    def write(self, after: StoredRecord) -> None:
        self._store.stored, self._store.highest = after, max(self.highest, after.record.token)

    def remove(self, *, forget: bool) -> None:
        self._store.stored = None


def perform(
    store: Any, call: Call, attempt: bytes, token: int | None, claim: Any = None, tick: int = TICK
) -> Any:
    """Ask a store; ``token`` and ``claim`` have its own tokens, and a ``tick`` takes so long there."""
    scope, task, how = call.scope, call.task, call.how
    note = NOTE if how.endswith("by operator") else ""
    message = b"message of " + task.encode() if scope.message else None
    asked: Any = {"identity": KEY, "fingerprint": FINGERPRINTS.get(task), "task_id": task}
    keep_ms = KEEP * tick // TICK
    asked |= {"keep_ms": keep_ms, "message": message, "each_runs": scope.each_runs}
    match call.verb:
        case "claim":
            asked |= {"attempt": attempt, "lease_ms": tick, "on_stale": scope.on_stale}
            return store.claim(records.ClaimRequest(worker="w:1", **asked))
        case "reserve":
            asked |= {"deadline_ms": tick, "copies": (task,) if how == "staged" else ()}
            return store.reserve(records.ReserveRequest(**asked))
        case "renew":
            each: Any = {"identity": KEY, "token": token, "lease_ms": tick, "keep_ms": keep_ms}
            return store.renew([records.Renewal(**each)]) == [True]
        case "settle":
            end: Any = State.FAILED if how[0] in "FS" else State.COMPLETED
            more: Any = {"restore": how in OWN, "swept": how == "S", "note": note}
            more["message"] = message if end is State.FAILED else None  # to be run again
            retention = scope.retention * tick // TICK
            return store.settle(records.SettleRequest(claim, end, value_of(how), retention, **more))
        case "release":
            requeue_ms = tick if how == "retry" else None
            return store.release(KEY, token=token, requeue_ms=requeue_ms, note=note)
        case "take_back":
            return store.take_back(KEY, attempt=attempt, requeue_ms=tick)
        case "checkpoint":
            return store.checkpoint(KEY, token=token, name="pay", value=value_of(call.how))
        case "requeue":
            return store.requeue(KEY, deadline_ms=tick, token=token, note=NOTE)
        case "forget":
            return store.forget(KEY, token=token, state=State(call.how))
        case "replace":
            return store.replace(KEY, token=token, message=b"newest")
        case "start":
            return store.start(KEY, task_id=task, token=token)
        case "sweep":
            return store.sweep(limit=10, requeue_ms=tick)
        case verb:
            return getattr(store, verb)(KEY, token=token)


def value_of(how: str) -> Stored:
    return Stored("text/plain", "utf-8", how.encode())


def word_of(answer: Any) -> str:
    """Return an answer in one word."""
    match answer:
        case bool() | None | Record():
            return "yes" if answer else "no"
        case records.SweepReport():
            return (
                "interrupted" if answer.interrupted else "requeued" if answer.requeued else "none"
            )
        case _:
            return type(answer).__name__.lower()


# -- records as the model keeps them: a token, and a number for all the rest --

_FIELDS = [field.name for field in fields(Record)]
#: By which a reservation is known.
_SENDERS = [
    table.arguments(
        records.ReserveRequest(identity=KEY, task_id=task, deadline_ms=0, keep_ms=0)
    ).attempt
    for task in FINGERPRINTS
]
_rest: list[StoredRecord | None] = [None]
_numbers: dict[Any, int] = {}


def number_of(stored: StoredRecord | None, now_ms: int = 0, back: int = 0) -> int:
    """Return the number of a record without its token; 0 if there is none.

    Left out is what no rule looks at. A deadline that is over, by more than the clock may be set ``back``, is over.
    """
    if stored is None:
        return 0
    old, attempt = stored.record, stored.attempt
    if old.state is State.PROCESSING:
        attempt = b"attempt."  # that of the claim with the record's token
    elif old.state is not State.QUEUED or attempt not in _SENDERS:
        attempt = b""
    deadline = None if old.deadline_ms is None else max(old.deadline_ms - now_ms, -back)
    record = replace(
        old, token=0, created_ms=0, updated_ms=0, deadline_ms=deadline, attempts=min(old.attempts, 2),
        crashes=min(old.crashes, _MOST_CRASHES),
    )  # fmt: skip
    life = min(stored.expires_ms - now_ms, max(deadline or 0, 0) + TICK + KEEP)
    stored = StoredRecord(record, life, attempt, min(stored.requeues, 1))
    values = [getattr(record, name) for name in _FIELDS]
    name = (repr(values), record.value and record.value.body, record.message, stored[1:])
    steps = tuple(step.body for _, step in record.steps)
    return _numbered((name, steps), stored)


def claim_of(number: int) -> int:
    """Return the number of what a settle needs of a claim."""
    if not number:
        return 0
    old = stored_of(number, 0).record
    record = replace(old, deadline_ms=None, steps=(), message=None, worker="", value=None)
    values = [getattr(record, name) for name in _FIELDS]
    return _numbered((repr(values), "claim"), StoredRecord(record, 0))


def _numbered(name: Any, stored: StoredRecord) -> int:
    if name not in _numbers:
        _numbers[name] = len(_rest)
        _rest.append(stored)
    return _numbers[name]


#: A claim that is of no use.
_FOREIGN = len(_rest)
_rest.append(StoredRecord(Record(KEY, State.INTERRUPTED, 0, 0, 0, task_id="a"), 0))


@cache
def stored_of(number: int, token: int) -> StoredRecord:
    """Return a record of the model."""
    stored = _rest[number]
    assert stored is not None
    return stored._replace(record=replace(stored.record, token=token))


# -- what the outside knows of a key, from the answers alone --


class Noted(NamedTuple):
    """The promises of a key that are due. Times are from now on; 0, or less, is over."""

    holder: int = 0
    #: Does the holder run, as far as anybody knows?
    runs: bool = False
    until: int = 0
    #: Whose message waits for a worker.
    waits: str = ""
    crashes: int = 0
    done: int = 0
    value: str = ""
    step: str = ""
    fingerprint: bytes | None = None
    task: str = ""
    #: Was it reserved? Whose messages were sent twice, and who of them is over, as another task has run since?
    placed: bool = False
    twice: str = ""
    past: str = ""

    @property
    def state(self) -> str:
        if self.done > 0:
            return "COMPLETED" if self.value[0] == "C" else "FAILED"
        return "PROCESSING" if self.runs else "QUEUED" if self.waits else "INTERRUPTED"


NOTHING = Noted()


def _need(holds: object, promise: str) -> None:
    if not holds:
        raise Broken(promise)


def note(
    g: Noted, call: Call, word: str, new: StoredRecord | None, top: int, *, owner: int = 0
) -> Noted:
    """Check an answer against what is noted, and return what is to be noted from now on.

    ``owner`` is the token of the claim that a take-back undoes; no token is larger than ``top`` before.
    """
    record = None if new is None else new.record
    token = record.token if record else 0
    own, alive = call.token == g.holder != 0, g.until > 0
    scope = call.scope
    mark = scope.each_runs and g.done > 0 and call.task != g.task
    if call.verb == "claim" and call.same and g.runs:
        _need(word == "claimed", "who asks again, because the answer was lost, is answered")
    match call.verb:
        case "claim" | "reserve" if word in ("claimed", "reserved"):
            assert record is not None
            asked = FINGERPRINTS[call.task]
            _need(call.task not in g.past, "a copy of a message is no new call")
            if call.same and token == g.holder and g.runs and word == "claimed":
                return g._replace(until=TICK)
            _need(not (g.runs and alive), "nobody is granted a key beside a live lease")
            _need(g.done <= 0 or mark, "nobody is granted a completed key within its retention")
            over = g.past + g.task * (g.task in g.twice)
            old = NOTHING._replace(twice=g.twice, past=over) if mark else g
            known = None in (old.fingerprint, asked) or old.fingerprint == asked
            _need(known, "a key is not granted for other arguments")
            _need(token > top or (token == g.holder and word == "reserved"), "tokens grow")
            # A message that is sent again is that of the first call, with its arguments.
            asked = old.fingerprint if token == g.holder else old.fingerprint or asked
            is_new = token != g.holder
            g = old._replace(
                holder=token, runs=False, fingerprint=asked, crashes=old.crashes + g.runs
            )
            if word == "claimed":
                return g._replace(runs=True, until=TICK, waits="", task=call.task)
            # Who asks again, because the answer was lost, is answered as before.
            others = old.waits and alive and call.task not in (old.waits, old.task)
            _need(not others, "one message waits for a key")
            _need(record.task_id == (old.waits or record.task_id), "it has the first task id")
            # Of a message that is sent again while its first run goes on, nobody knows but that run's record.
            sent = call.how == "staged" and is_new and call.task not in g.twice
            twice = g.twice + call.task * sent
            g = g._replace(until=record.deadline_ms or 0, waits=record.task_id, task=call.task)
            return g._replace(placed=old.placed or is_new, twice=twice)
        case "claim" | "reserve" if word == "held":
            _need(
                alive and (g.runs or (g.waits and call.verb == "reserve")),
                "a free key holds nobody up",
            )
        case "claim" | "reserve" if word == "settled":
            copy = record is not None and call.task in record.copies
            _need(copy or (g.done > 0 and not mark), "only a completed key answers")
        case "claim" | "reserve":
            other = None not in (g.fingerprint, FINGERPRINTS[call.task])
            _need(other and g.fingerprint != FINGERPRINTS[call.task], "equal arguments are let in")
        case "take_back" if owner and owner == g.holder and g.runs:
            _need(word == "yes", "a claim that nobody heard of is taken back")
            return _given_back(g, record)
        case "renew" | "checkpoint":
            if word == "no":
                _need(not (own and (g.runs or g.value == "S")), "the holder goes on")
                return g
            _need(own and (g.done <= 0 or g.value == "S"), "a late worker is refused")
            if g.done > 0:  # a sweep settled it: its owner may still replace that
                return g
            if call.verb == "checkpoint":
                return g._replace(step=g.step or call.how)
            return g._replace(runs=True, until=TICK, waits="")
        case "settle" if call.how in OWN:
            late = g.holder not in (0, call.token)
            _need((word == "no") == late, "a late result is refused, the holder's is stored")
            if late or (g.done > 0 and g.value != "S"):
                return g
            return _settled(g, call, record)
        case "settle" if word == "yes":
            _need(own or call.how == "S", "an operator ends what was seen")
            if call.how == "S":  # a sweep settles what it has interrupted
                if g.done > 0:
                    return g
                _need(own and not g.runs, "a sweep fails nobody who runs")
            else:
                _need(token > top, "an operation gives a new token")
            return _settled(g, call, record)
        case "release":
            _need(word == "no" or (own and (g.runs or g.waits)), "a late worker gives nothing back")
            _need(word == "yes" or not (own and g.runs), "the holder gives its key back")
            stays = g.step or (call.how == "retry" and (g.placed or scope.message))
            _need(word == "no" or record or not stays, "steps, and a retry's place, stay")
            return g if word == "no" else _given_back(g, record)
        case "interrupt":
            _need(
                (word == "yes") == (own and g.runs), "a crash is counted to the claim that ended so"
            )
            if word == "yes":
                return g._replace(runs=False, until=0, crashes=g.crashes + 1)
        case "mark_delivered":
            _need(word == "no" or (own and g.done > 0), "the callbacks of this end were sent")
        case "requeue" if word == "yes":
            _need(
                own if call.token is not None else not (g.runs and alive), "who runs is left alone"
            )
            _need(token > top, "an operation gives a new token")
            if g.done > 0:
                _need(g.state == "FAILED", "what is completed is not run again")
                g = g._replace(done=0, value="", crashes=0)
            return _waiting(g._replace(crashes=g.crashes + g.runs), record)
        case "sweep" if word == "none":
            _need(not g.runs or alive, "a lease that is over is swept")
        case "sweep":
            _need(not alive, "a sweep leaves a live lease alone")
            again = not g.runs or (scope.message and scope.on_stale == "requeue")
            _need((word == "requeued") == bool(again), "what asks for it is sent again")
            return _waiting(g._replace(crashes=g.crashes + g.runs), record)
        case "replace" if word == "yes":
            _need(
                own and g.waits and token > top,
                "a new message takes the place of the one that waits",
            )
            return g._replace(holder=token)
        case "start" if word == "yes":
            _need(g.waits == call.task, "the place is given up by the task that had it")
            return NOTHING
        case "forget" if word == "yes":
            _need(own and call.how == g.state, "an operator forgets what was seen")
            return NOTHING
    return g


def _given_back(g: Noted, record: Record | None) -> Noted:
    return NOTHING if record is None else _waiting(g, record)


def _waiting(g: Noted, record: Record | None) -> Noted:
    """Nobody runs: the key is INTERRUPTED, or its message waits."""
    assert record is not None
    waits = record.task_id if record.state is State.QUEUED else ""
    return g._replace(holder=record.token, runs=False, until=record.deadline_ms or 0, waits=waits)


def _settled(g: Noted, call: Call, record: Record | None) -> Noted:
    assert record is not None
    crashes = record.crashes if g.holder == 0 else g.crashes
    return g._replace(
        holder=record.token, runs=False, until=0, waits="", done=call.scope.retention,
        value=call.how, crashes=crashes, step="", fingerprint=record.fingerprint, task=record.task_id,
    )  # fmt: skip


def agree(g: Noted, new: StoredRecord | None) -> None:
    """Compare a record with what is noted."""
    if new is None:
        _need(g.holder == 0, "a record stays while somebody relies on it")
        return
    record = new.record
    _need(record.token == g.holder, "the newest claim has the key")
    _need(record.crashes == g.crashes, "each crash is counted once, and nothing else")
    _need((record.state is State.PROCESSING) == g.runs, "who runs has the key")
    _need(record.state.is_final == (g.done > 0), "a completed key stays so")
    _need((record.state is State.QUEUED) == bool(g.waits), "who waits has a place")
    if g.runs:
        _need(record.deadline_ms == g.until, "a lease lasts as long as was said")
    if record.state.is_final:
        _need(record.value == value_of(g.value), "the first result stays")
        _need((record.state is State.COMPLETED) == (g.value[0] == "C"), "the first end stays")
    else:
        steps = tuple(step for _, step in record.steps)
        _need(steps == ((value_of(g.step),) if g.step else ()), "the first result of a step stays")


# -- the world --

#: Its phase, the key, its task, the token of its claim, the number of that, and how it ends.
Worker = tuple[str, int, str, int, int, str]
IDLE: Worker = ("idle", 0, "", 0, 0, "")


#: The number of its record, its token, and what is noted.
Key = tuple[int, int, Noted]


class World(NamedTuple):
    """Keys; the larger tokens; workers; a replica."""

    keys: tuple[Key, ...]
    #: The largest token as the store knows it, and of all that were given out.
    highest: int
    top: int
    #: For how many ticks the clock is behind the largest token.
    behind: int
    workers: tuple[Worker, ...]
    replica: tuple[Any, int] | None
    faults: int


class Act(NamedTuple):
    """A call of a worker: what it becomes if that is granted, or else; ``owner`` as for :func:`note`."""

    call: Call
    granted: str
    refused: str
    owner: int = 0


#: Of each record, the calls that came to it, with tokens relative to its own, and the record after each.
Graph = dict[int, dict[Call, int]]
_CLOCK_US = 999  # later than every token, and within the first millisecond
_REFUSALS = ("no", "none", "held", "settled", "mismatched")


class Model:
    """A scope, and the worlds that it leads to."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.graph: Graph = {}
        self.back = 2 * TICK if "step back" in scope.faults else 0
        self.answer = lru_cache(maxsize=None)(self._answer)
        self.acts = lru_cache(maxsize=None)(self._acts)
        self.ticked = lru_cache(maxsize=None)(self._ticked)
        self.environment = lru_cache(maxsize=None)(self._environment)

    def start(self) -> World:
        keys = ((0, 0, NOTHING),) * self.scope.keys
        replica = (keys, 0) if "failover" in self.scope.faults else None
        return World(keys, 0, 0, 0, (IDLE,) * self.scope.workers, replica, self.scope.most_faults)

    def _answer(
        self, key: Key, highest: int, top: int, behind: bool, call: Call, owner: int
    ) -> tuple[str, Key, int]:
        number, token, g = key
        store = TableStore()
        before = store.stored = stored_of(number, token) if number else None
        store.highest, store.now_us = highest if behind else top, 0 if behind else _CLOCK_US
        claim = stored_of(call.claim, call.token or 0).record if call.claim else None
        attempt = b"attempt." if call.same else b"another."
        word = word_of(perform(store, call, attempt, call.token, claim))
        new = store.stored
        _need(
            word not in _REFUSALS or new == before, f"what is refused changes nothing ({call.verb})"
        )
        # Behind its largest token, a store that has lost it gives out smaller ones again: then nothing is said of them.
        growing = highest if behind else top
        g = note(g._replace(holder=token), call, word, new, growing, owner=owner)
        g = g._replace(crashes=min(g.crashes, _MOST_CRASHES))
        after = number_of(new, back=self.back)
        token = new.record.token if new else 0
        agree(g, stored_of(after, token) if after else None)
        if call.token is not None:
            own = before.record.token if before else call.token
            call = call._replace(token=(call.token > own) - (call.token < own))
        self.graph.setdefault(number, {})[call] = after
        highest = max(token, store.highest if behind else highest)
        return word, (after, token, g._replace(holder=0)), highest

    def ask(self, world: World, k: int, call: Call, owner: int = 0) -> tuple[str, World]:
        behind = world.behind > 0
        try:
            word, key, highest = self.answer(
                world.keys[k], world.highest, world.top, behind, call, owner
            )
        except Broken as broken:
            raise Broken(f"{broken}: {call.verb} {call.task} {call.how}") from None
        keys = (*world.keys[:k], key, *world.keys[k + 1 :])
        return word, world._replace(keys=keys, highest=highest, top=max(world.top, highest))

    # -- what may happen --

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield what may happen next, in words, and the world after that."""
        urgent = False
        for i, worker in enumerate(world.workers):
            phase, own, _, token, _, _ = worker
            # The store answers: then what was given up is undone long before a lease ends.
            urgent |= phase == "gives back" or (phase == "gave up" and token > 0)
            if i and worker == world.workers[i - 1]:
                continue  # it is alike
            for k in range(self.scope.keys) if phase == "idle" else (own,):
                key = world.keys[k]
                for act in self.acts(worker, k, key[1], key[2].value, key[2].step):
                    yield from self._done(world, i, worker, k, act)
        for k, (number, token, g) in enumerate(world.keys):
            for call in self.environment(number, token, g.waits):
                word, after = self.ask(world, k, call)
                yield f"{call.verb} {call.task}{call.how}: {word}", after
        if not urgent:
            yield "a tick", self._tick(world)
        if world.faults:
            yield from self._faults(world)
        if world.replica is not None:
            yield "the replica catches up", world._replace(replica=(world.keys, world.highest))

    def _done(
        self, world: World, i: int, worker: Worker, k: int, act: Act
    ) -> Iterator[tuple[str, World]]:
        phase, _, task, token, claim, how = worker
        call = act.call
        word, after = ("", world) if call.verb == "" else self.ask(world, k, call, act.owner)
        becomes = act.refused if word in (*_REFUSALS, "") else act.granted
        if word == "claimed":
            number, token, g = after.keys[k]
            task, claim = call.task, claim_of(number)
            if becomes == "runs" and g.crashes > CAP:
                becomes = "refuses"
        if becomes in ("idle", "late"):
            token, claim = 0, 0
        if becomes == "asks" and phase == "idle":
            task = call.task
        if becomes in ("settles", "gives back"):
            how = call.how
        new = IDLE if becomes == "idle" else (becomes, k, task, token, claim, how)
        workers = tuple(sorted((*world.workers[:i], new, *world.workers[i + 1 :])))
        label = f"a worker that {phase} → {becomes}: {call.verb} {call.task} {call.how} {word}"
        yield label, after._replace(workers=workers)

    def _acts(self, worker: Worker, k: int, current: int, value: str, step: str) -> list[Act]:
        phase, _, task, token, claim, how = worker
        scope, nothing = self.scope, Call("")
        same = token == current != 0

        def take(task: str, granted: str, refused: str, *, same: bool = False) -> Act:
            return Act(Call("claim", task, same=same, scope=scope.policy), granted, refused)

        def end(how: str, becomes: str) -> Act:
            return Act(
                Call("settle", token=token, how=how, claim=claim, scope=scope.policy),
                becomes,
                "idle",
            )

        def give(how: str, becomes: str) -> Act:
            return Act(Call("release", token=token, how=how, scope=scope.policy), becomes, "idle")

        late, gone = take(task, phase, phase), Act(nothing, "", "idle")
        match phase:
            case "idle":
                found = [take(each, "runs", "idle") for each in scope.tasks]
                if scope.lost:
                    found += [Act(Call("", each), "", "asks") for each in scope.tasks]
                return found
            case "asks":
                # The store carries it out now, or with the repetition, or after that was given up.
                found = [take(task, "runs", "idle", same=same), Act(nothing, "", "gave up")]
                found.append(Act(nothing, "", "idle" if token else "late"))  # it dies
                return found if token else [*found, late]
            case "gave up":
                back = Call("take_back", same=same)
                found = [Act(back, "idle", "idle", token), Act(back, "gave up", "gave up", token)]
                if not token:
                    return [late, Act(nothing, "", "late"), gone, Act(back, phase, phase)]
                return [*found, gone]  # or it dies
            case "late":
                return [take(task, "idle", "idle"), gone]
            case "runs" | "refuses":
                ends = ["F"] if phase == "refuses" else ["C2" if value else "C1"]
                ends += ["F"] * (scope.permanent and phase == "runs")
                found = [end(each, "idle") for each in ends]
                if scope.lost:
                    found += [end(each, "settles") for each in ends]
                # It dies: its main process notices, or is gone as well.
                found += [Act(nothing, "", "dead"), gone]
                if phase == "runs":
                    found.append(Act(Call("renew", token=token), "runs", "runs"))
                    hows = ["", "retry"] if scope.message or scope.reserves else [""]
                    found += [give(each, "idle") for each in hows]
                    if scope.lost:
                        found += [
                            give(hows[-1], "gives back"),
                            Act(Call("", how=hows[-1]), "", "gives back"),
                        ]
                    if scope.steps:
                        kept = Call("checkpoint", token=token, how="2" if step else "1")
                        found.append(Act(kept, "runs", "runs"))
                return found
            case "settles":
                return [end(how, "idle"), gone]
            case "gives back":
                return [give(how, "idle"), gone]
            case _:  # dead
                note = Call("interrupt", token=token)
                return [
                    Act(note, "idle", "idle"),
                    *([Act(note, "dead", "dead")] * scope.lost),
                    gone,
                ]

    def _environment(self, number: int, token: int, waits: str) -> list[Call]:
        """Return the calls of publishers, sweeps and operators to a key."""
        scope, found = self.scope, [Call("sweep", scope=self.scope.policy)]
        record = stored_of(number, token).record if number else None
        if scope.reserves:
            hows = ["", "staged"] if scope.each_runs else [""]
            found += [
                Call("reserve", task, how=how, scope=scope.policy)
                for task in scope.tasks
                for how in hows
            ]
            found += [Call("start", task) for task in scope.tasks]
            if waits:
                found += [Call("replace", token=token), Call("release", token=token)]
        if record is None:
            if scope.operator:
                found += [Call("settle", token=1, how="S", claim=_FOREIGN, scope=scope.policy)]
            return found
        seen = claim_of(number)
        if scope.on_stale == "fail":
            interrupted = claim_of(
                number_of(StoredRecord(replace(record, state=State.INTERRUPTED), 0))
            )
            found.append(
                Call("settle", token=token, how="S", claim=interrupted, scope=scope.policy)
            )
        if record.state.is_final:
            found.append(Call("mark_delivered", token=token))
        if scope.message:
            found.append(Call("requeue"))
        if scope.operator:
            for each in (token, token - 1):  # as it is, and as it was
                found += [
                    Call("forget", token=each, how=state)
                    for state in ("PROCESSING", record.state.value)
                ]
                found += [Call("requeue", token=each), Call("mark_delivered", token=each)]
                found.append(Call("release", token=each, how="by operator"))
                for how in ("C by operator", "F by operator"):
                    found.append(
                        Call("settle", token=each, how=how, claim=seen, scope=scope.policy)
                    )
        return found

    def _tick(self, world: World) -> World:
        return self._passed(world, TICK)._replace(behind=max(world.behind - 1, 0))

    def _passed(self, world: World, ms: int) -> World:
        keys = tuple(self.ticked(key, ms) for key in world.keys)
        if world.replica is None:
            return world._replace(keys=keys)
        copies, highest = world.replica
        copied = tuple(self.ticked(key, ms) for key in copies)
        return world._replace(keys=keys, replica=(copied, highest))

    def _ticked(self, key: Key, ms: int) -> Key:
        """Let time pass by the store's clock; less than 0: it is set back."""
        number, token, g = key
        if not number:
            return key
        stored = stored_of(number, token)
        until = max(g.until - ms, -self.back) if g.runs or g.waits else 0
        g = g._replace(until=until, done=g.done and g.done - ms)
        if stored.expires_ms <= ms:
            over = g.done < 0 or (g.done == 0 and until <= 0)
            _need(over, "a record stays while somebody relies on it")
            after, token, g = 0, 0, NOTHING
        else:
            after = number_of(stored, ms, self.back)
            agree(g._replace(holder=token), stored_of(after, token))
        self.graph.setdefault(number, {})[Call("tick", how=str(ms))] = after
        return after, token, g

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        left = world.faults - 1
        for fault in self.scope.faults:
            if fault == "flush":
                # With the records every promise about them is gone; tokens still grow, by the time.
                keys = ((0, 0, NOTHING),) * self.scope.keys
                yield fault, world._replace(keys=keys, highest=0, faults=left)
            elif fault == "failover" and world.replica is not None:
                # What the replica has not heard of was never promised.
                keys, highest = world.replica
                yield fault, world._replace(keys=keys, highest=highest, faults=left)
            elif fault == "step back" and not world.behind:
                yield fault, self._passed(world, -2 * TICK)._replace(behind=2, faults=left)


def canonical(world: World) -> World:
    """Give tokens the smallest numbers in the same order: even ones, so that smaller ones fit between."""
    keys, highest, top, behind, workers, replica, faults = world
    tokens = {highest, top, *(key[1] for key in keys), *(worker[3] for worker in workers)}
    if replica is not None:
        tokens.update((replica[1], *(key[1] for key in replica[0])))
    tokens.discard(0)
    if max(tokens, default=0) == 2 * len(tokens) and not any(token % 2 for token in tokens):
        return world
    new = {token: 2 * n for n, token in enumerate(sorted(tokens), 1)}
    new[0] = 0
    if replica is not None:
        replica = (tuple((n, new[t], g) for n, t, g in replica[0]), new[replica[1]])
    return World(
        tuple((n, new[t], g) for n, t, g in keys), new[highest], new[top], behind,
        tuple(sorted((a, b, c, new[t], d, e) for a, b, c, t, d, e in workers)), replica, faults,
    )  # fmt: skip


@dataclass
class Explored:
    """The outcome for a scope: how much was visited, and the promise that was broken, with the way there."""

    scope: Scope
    worlds: int = 0
    steps: int = 0
    broken: str = ""
    way: tuple[str, ...] = ()
    graph: Graph | None = None


#: No scope is larger than that; a larger one would not be visited whole.
MOST = 4_000_000


@cache
def explored(scope: Scope, most: int = MOST) -> Explored:
    """Visit every world, once: the traces go by the same graph. Stop at the first broken promise."""
    model = Model(scope)
    first = canonical(model.start())
    worlds, seen = [first], {first: 0}
    came_from, steps, at = array("l", [0]), 0, 0
    trail = ""
    try:
        while at < len(worlds) and len(worlds) < most:
            world = worlds[at]
            for trail, reached in model.moves(world):  # noqa: B007
                steps += 1
                after = canonical(reached)
                if after not in seen:
                    seen[after] = len(worlds)
                    worlds.append(after)
                    came_from.append(at)
            at += 1
        trail = ""
        for number in list(model.graph):
            can_end(model, number)
    except Broken as broken:
        way = _way(model, worlds, came_from, at) if trail else ()
        return Explored(
            scope, len(worlds), steps, f"{broken}", (*way, f"then: after {trail!r}, another")
        )
    return Explored(scope, len(worlds), steps, graph=model.graph)


def _way(model: Model, worlds: list[World], came_from: array[int], at: int) -> tuple[str, ...]:
    labels = []
    while at:
        before, after = came_from[at], worlds[at]
        labels.append(
            next(label for label, each in model.moves(worlds[before]) if canonical(each) == after)
        )
        at = before
    return tuple(reversed(labels))


def can_end(model: Model, number: int) -> None:
    """Check that what was accepted can always end: its lease ends, its message comes (again), it is run and settled."""
    store, scope = TableStore(), model.scope
    store.stored, store.highest = stored_of(number, 2) if number else None, 2
    for tick in range(8):
        store.now_us = tick * TICK * 1000
        if store.stored is None or store.stored.record.state.is_final:
            break
        record = store.stored.record
        if (
            record.state is State.QUEUED
            and (record.deadline_ms or 0) <= tick * TICK
            and record.message is not None
        ):
            _need(
                word_of(perform(store, Call("sweep"), b"", None)) == "requeued",
                "a lost message is sent again",
            )
        claim = Call("claim", record.task_id, scope=scope.policy)
        answer = perform(store, claim, b"the last", None)
        if isinstance(answer, records.Claimed):
            perform(store, Call("settle", how="C1", scope=scope.policy), b"", None, answer.record)
    ended = number == 0 or (store.stored is not None and store.stored.record.state.is_final)
    _need(ended, "what was accepted can always end")


FAULTS = "flush", "failover", "step back"
SCOPES = (
    Scope(name="workers", workers=3),
    Scope(name="answers", lost=True, permanent=True),
    Scope(name="queue", workers=1, reserves=True, message=True, on_stale="requeue"),
    Scope(name="operator", workers=1, operator=True, steps=True, message=True),
    Scope(name="faults", tasks="a", faults=FAULTS, most_faults=1),
    Scope(name="mark", workers=1, each_runs=True, reserves=True),
    Scope(name="fail", on_stale="fail", steps=True, permanent=True),
    Scope(name="arguments", workers=1, tasks="axn", reserves=True),
    Scope(name="two keys", keys=2, tasks="a"),
)
#: What takes an hour.
LARGE = (
    Scope(name="workers, answers", workers=3, lost=True),
    Scope(name="queue", reserves=True, message=True, on_stale="requeue"),
    Scope(name="operator", operator=True, steps=True, message=True),
    Scope(name="faults, two tasks", faults=FAULTS, most_faults=1),
    Scope(name="two faults", tasks="a", faults=FAULTS, most_faults=2),
)


def run(options: Options) -> list[Row]:
    rows = []
    for scope in SCOPES + LARGE * options.full:
        found = explored(scope)
        assert found.worlds < MOST, f"{scope.name} is not visited whole"
        say(f"{scope.name}: {found.worlds:,} worlds, {found.steps:,} steps. {found.broken}")
        for step in found.way:
            say(f"    {step}")
        rows.append(found)
    broken = [f"{each.scope.name}: {each.broken}" for each in rows if each.broken]
    much = (
        f"{sum(each.worlds for each in rows):,} worlds, {sum(each.steps for each in rows):,} steps"
    )
    return [
        Row(
            name="model of a key",
            what=f"{len(rows)} scopes, each visited whole",
            how_many=much,
            found="; ".join(broken) or "no promise broken",
            command="python -m tests.proof model",
            held=not broken,
        )
    ]
