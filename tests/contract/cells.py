"""The contract of every verb in every state: a walk over the table that the stores go by, cell by cell.

A cell is a rule and one of the states that it is for. Each condition says below how to make it true, and how to make it
false: the walk makes those of the rules before false, and that of the rule itself true. For example::

    the rules of claim for PROCESSING, in order     made     by
    1  "another fingerprint" ─▶ mismatched          false    the same fingerprint (as a scene has it at first)
    2  "the same attempt" ─▶ claimed                false    another attempt (likewise)
    3  "before its deadline" ─▶ held                true     not past its lease: claim ─▶ Held

A store that fails here does something else than the table says in the state, and under the condition, that the test's
id names: ``claim PROCESSING before its deadline``.
"""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import (
    ClaimRequest,
    Identity,
    Record,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.table import TABLE, Fields, Rule, StoredRecord, Verb
from tests.contract.base import (
    END_STATE_BY_NAME,
    FINGERPRINT,
    KEY,
    MESSAGE,
    OTHER_FINGERPRINT,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
)
from tests.support.tiers import THOROUGH

NOTE = "complete by alice: the bank has it"
#: The attempt of the claim that is there.
MINE = b"attempt1"
ENDING = Stored(content_type="text/plain", content_encoding="utf-8", body=b"an end")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is there, and what is asked for: at first, what makes as few conditions true as can be."""

    # The record.
    is_first: bool = False  # of its key
    late: bool = False  # past the lease, or the deadline
    steps: bool = True
    stored_message: bytes | None = MESSAGE
    on_stale: str = "interrupt"
    taken_over: bool = False
    # The verb.
    attempt: bytes = b"another_"
    task_id: str = "another"
    copies: tuple[str, ...] = ()
    each_runs: bool = False
    message: bytes | None = None
    fingerprint: bytes = FINGERPRINT
    token: int | None = 0  # is added to the record's own
    another_state: bool = False
    swept: bool = False
    restore: bool = True
    retry: bool = False
    step: str = "ship"
    note: str = ""


#: What makes each condition of a rule true, and what makes it false.
SCENES: dict[str, tuple[dict[str, object], Fields]] = {
    "": ({}, {}),
    "another fingerprint": ({"fingerprint": OTHER_FINGERPRINT}, {}),
    "a copy of an earlier task": ({"copies": ("another",)}, {}),
    "each runs, the mark of another task": ({"each_runs": True}, {}),
    "another task": ({}, {"task_id": TASK_ID}),
    "another token": ({"token": 1}, {}),
    "another state": ({"another_state": True}, {}),
    "the same attempt": ({"attempt": MINE, "taken_over": True}, {}),
    "another attempt": ({}, {"attempt": MINE}),
    "was claimed before": ({}, {"is_first": True}),
    "the same task id, with a message": ({"task_id": TASK_ID, "message": b"brought"}, {}),
    "the same task id": ({"task_id": TASK_ID}, {}),
    "before its deadline": ({}, {"late": True}),
    "before its deadline, no token given": ({"token": None}, {"late": True, "token": None}),
    "seen in this state": ({"restore": False}, {}),
    "not swept": ({}, {"swept": True}),
    "swept": ({"swept": True}, {}),
    "swept, may be restored": ({"swept": True}, {}),
    "may be restored": ({}, {"restore": False}),
    "a retry is announced": ({"retry": True}, {}),
    "has steps": ({}, {"steps": False}),
    "has steps, by an operator": ({"note": NOTE}, {}),
    "by an operator": ({"note": NOTE}, {}),
    "has this step": ({"step": "pay"}, {}),
    "has no message": ({"stored_message": None}, {}),
    "requeue if stale, has a message": ({"on_stale": "requeue"}, {}),
}
#: Of each field of a record that a request brings, a value that no other test has.
UNUSUAL: Fields = {
    "fingerprint": OTHER_FINGERPRINT,
    "task_id": "no UUID, and 漢",
    "worker": "web-9:1/漢",
    "on_stale": "requeue",
    "message": b"\0\xff\n",
    "uncommitted": True,
    "copies": ("of another", "漢"),
    "state": State.FAILED,
    "value": ENDING,
    "replaced": True,
    "swept": True,
    "note": NOTE,
    "error": "Declined: 漢",
}
EMPTY = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(Record)
}
CELLS = [(rule, found) for rule in TABLE for found in rule.found]
#: One for each answer of a verb, and what it leaves behind: the same table decides on all others.
FEW_CELLS = list(
    {(rule.verb, rule.answer, rule.then): (rule, found) for rule, found in CELLS}.values()
)


def scene_of(rule: Rule, found: State | None) -> Scene:
    """Return what makes this the first rule of its verb that holds."""
    changes: Fields = {}
    for each in TABLE:
        if each.verb == rule.verb and found in each.found:
            if each is rule:
                break
            changes |= SCENES[each.when][1]
    return Scene(**{**changes, **SCENES[rule.when][0]})


#: Answers of verbs that say no more than yes or no: these are no.
NO = ("lost", "none")


class CellContract(ContractBase):
    """Every rule of the table, in every state that it is for."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "rule" in metafunc.fixturenames:
            cells = FEW_CELLS if self.few_cells and not THOROUGH else CELLS
            ids = [
                f"{each.verb} {found.name if found else 'none'} {each.when}"
                for each, found in cells
            ]
            metafunc.parametrize(("rule", "found"), cells, ids=ids)

    def test_a_verb_does_what_the_table_says(
        self, store: Store, advance: Advance, rule: Rule, found: State | None
    ) -> None:
        scene = scene_of(rule, found)
        claim, left_ms = self._bring(store, advance, scene, found)
        before = store.get(KEY)
        assert (before.state if before else None) is found
        passed = self.lease_ms + 10 if scene.late else 10
        advance(passed)

        record = before or claim
        answer, brought = getattr(self, f"_{rule.verb}")(store, scene, record)
        assert answer in (rule.answer, rule.answer not in NO)
        after = store.get(KEY)
        if rule.then is None:
            assert after == before
        elif rule.then == "deleted":
            assert after is None
        else:
            assert after is not None
            self._has_what_the_rule_says(
                rule, record if found or rule.carried else None, after, brought
            )

        if rule.then not in (None, "deleted"):
            left_ms -= passed
            if rule.life == "anew":
                left_ms = self.keep_ms if rule.verb == "settle" else self.delay_ms + self.keep_ms
            elif rule.life == "longer":
                left_ms += self.delay_ms
            advance(left_ms - self.keep_ms / 2)
            assert store.get(KEY) is not None
            advance(self.keep_ms / 2 + 1)
            assert store.get(KEY) is None

    @pytest.mark.parametrize("kind", table.SHARED)
    def test_no_field_of_a_request_is_lost(self, store: Store, kind: type[table.Request]) -> None:
        """Each field alone, as some lead away from a verb's fast path, then all together."""
        names = [name for name in table.SHARED[kind][0] if name != "identity"]
        for some in (*([name] for name in names), names):
            key = dataclasses.replace(KEY, key=" ".join(some))
            request = self._usual(store, kind, key)
            for name in some:
                setattr(request, name, UNUSUAL[name])
            verb: Verb
            before, returned, args = None, None, table.arguments(request)
            match request:
                case ClaimRequest():
                    verb, returned = "claim", store.claim(request).record
                case ReserveRequest():
                    verb, returned = "reserve", store.reserve(request).record
                case _:
                    verb, before = "settle", StoredRecord(request.record, 0)
                    assert store.settle(request)
            found = self.found(store, key)
            rule = table.decide(verb, before, args, found.updated_ms)
            assert found == table.after(rule, before, args, found.updated_ms, found.token).record
            assert returned in (None, found)

    def _usual(self, store: Store, kind: type[table.Request], key: Identity) -> table.Request:
        times: Fields = {"deadline_ms": self.lease_ms, "keep_ms": self.keep_ms}
        if kind is ClaimRequest:
            return ClaimRequest(key, MINE, self.lease_ms, self.keep_ms)
        if kind is ReserveRequest:
            return ReserveRequest(identity=key, task_id=TASK_ID, **times)
        # The settle keeps some of the claim, and of what was before it.
        token = self.claim(store, key).token
        assert store.checkpoint(key, token=token, name="pay", value=VALUE)
        assert store.release(key, token=token, note=NOTE)
        claim = self.claim(store, key, task_id=UNUSUAL["task_id"])
        return SettleRequest(claim, State.COMPLETED, VALUE, self.keep_ms)

    @property
    def delay_ms(self) -> int:
        """Return for how long the verbs take a lease, or set a deadline."""
        return 2 * self.lease_ms

    def _bring(
        self, store: Store, advance: Advance, scene: Scene, found: State | None
    ) -> tuple[Record, int]:
        """Bring the key into a state, with a past; return the claim, and how long the record lives."""
        if not scene.is_first:
            self.reserve(store, copies=scene.copies)
            assert store.interrupt(KEY, token=self.claim(store).token)
        requeued = scene.swept and found is State.QUEUED
        claim = self.claim(
            store,
            attempt=MINE,
            on_stale="requeue" if requeued else scene.on_stale,
            message=scene.stored_message,
        )
        if scene.steps:
            assert store.checkpoint(KEY, token=claim.token, name="pay", value=VALUE)
        life_ms = self.lease_ms + self.keep_ms
        match found:
            case None:
                assert store.forget(KEY)
            case State.QUEUED | State.INTERRUPTED if scene.swept:
                advance(self.lease_ms + 1)
                life_ms -= self.lease_ms + 1
                report = store.sweep(limit=10, requeue_ms=self.lease_ms)
                (swept,) = (*report.interrupted, *report.requeued)
                assert (swept.state, swept.swept) == (found, True)
                life_ms += self.lease_ms * (found is State.QUEUED)
            case State.QUEUED:
                assert store.release(KEY, token=claim.token, requeue_ms=self.lease_ms)
                self.reserve(store, uncommitted=True)
                if scene.taken_over:
                    advance(self.lease_ms + 1)
                    self.reserve(store, task_id=scene.task_id)
            case State.INTERRUPTED:
                assert store.interrupt(KEY, token=claim.token)
            case _ if found.name in END_STATE_BY_NAME:
                end = END_STATE_BY_NAME[found.name]
                message = scene.stored_message if found is State.FAILED else None
                assert self.settle(store, claim, end, swept=scene.swept, message=message)
                life_ms = self.keep_ms
        return claim, life_ms

    def _has_what_the_rule_says(
        self, rule: Rule, before: Record | None, after: Record, brought: Fields
    ) -> None:
        wanted = {**EMPTY, **brought, "identity": KEY, "attempts": 0}
        wanted |= {name: getattr(before, name) for name in rule.carried}
        if rule.resends and before is not None:
            wanted["copies"] = (*before.copies, before.task_id)
        wanted["crashes"] += rule.crashes
        wanted["attempts"] += rule.attempts
        if isinstance(rule.then, State):
            wanted["state"] = rule.then
        if "token" not in rule.carried:
            assert after.token > (before.token if before else 0)
            wanted["token"] = after.token
        if "updated_ms" not in rule.carried:
            assert after.updated_ms > (before.updated_ms if before else 0)
            wanted["updated_ms"] = after.updated_ms
        if "created_ms" not in rule.carried:
            wanted["created_ms"] = after.updated_ms
        if "deadline_ms" not in rule.carried and after.state in (State.PROCESSING, State.QUEUED):
            assert after.deadline_ms is not None
            if "updated_ms" in rule.carried:
                assert before is not None
                assert before.deadline_ms is not None
                assert after.deadline_ms > before.deadline_ms
                wanted["deadline_ms"] = after.deadline_ms
            else:
                wanted["deadline_ms"] = after.updated_ms + self.delay_ms
        found = {name: getattr(after, name) for name in wanted}
        assert found == wanted

    # Each verb: its answer, and the fields that it brings.

    def _claim(self, store: Store, scene: Scene, _: Record) -> tuple[str, Fields]:
        brought: Fields = {
            "task_id": scene.task_id,
            "worker": "web-2:1",
            "on_stale": "fail",
            "message": scene.message,
            "fingerprint": scene.fingerprint,
        }
        answer = self.try_claim(
            store,
            attempt=scene.attempt,
            lease_ms=self.delay_ms,
            each_runs=scene.each_runs,
            **brought,
        )
        assert answer.record == store.get(KEY)
        return type(answer).__name__.lower(), brought

    def _reserve(self, store: Store, scene: Scene, record: Record) -> tuple[str, Fields]:
        brought: Fields = {
            "task_id": scene.task_id,
            "message": scene.message,
            "fingerprint": scene.fingerprint,
            "uncommitted": True,
        }
        answer = self.try_reserve(
            store, deadline_ms=self.delay_ms, each_runs=scene.each_runs, **brought
        )
        assert answer.record == store.get(KEY)
        swept = {"swept": True} if record.state is State.PROCESSING and scene.late else {}
        return type(answer).__name__.lower(), {**brought, "reserved": True, **swept}

    def _replace(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        return store.replace(KEY, token=token, message=b"newest"), {"message": b"newest"}

    def _start(self, store: Store, scene: Scene, record: Record) -> tuple[str, Fields]:
        before = store.get(KEY)
        found = store.start(KEY, task_id=scene.task_id, token=record.token + (scene.token or 0))
        assert found is None or found == before
        return "none" if found is None else "started", {}

    def _renew(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        return self.renew(store, record, token=token, lease_ms=self.delay_ms), {}

    def _settle(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        claim = dataclasses.replace(record, token=record.token + (scene.token or 0))
        brought: Fields = {
            "state": State.FAILED,
            "value": ENDING,
            "replaced": True,
            "note": scene.note,
        }
        restore = scene.restore
        if scene.another_state:
            claim = dataclasses.replace(claim, state=_another(claim.state))
            restore = False
        return self.settle(store, claim, restore=restore, **brought), brought

    def _release(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        requeue_ms = self.delay_ms if scene.retry else None
        done = store.release(KEY, token=token, requeue_ms=requeue_ms, note=scene.note)
        return done, {"note": scene.note}

    def _take_back(self, store: Store, scene: Scene, _: Record) -> tuple[bool, Fields]:
        requeue_ms = self.delay_ms if scene.retry else None
        return store.take_back(KEY, attempt=scene.attempt, requeue_ms=requeue_ms), {}

    def _interrupt(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        found = store.interrupt(KEY, token=record.token + (scene.token or 0))
        assert found is None or found == store.get(KEY)
        return found is not None, {}

    def _checkpoint(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        brought: Fields = {"steps": (*record.steps, (scene.step, ENDING))}
        return store.checkpoint(KEY, token=token, name=scene.step, value=ENDING), brought

    def _mark_delivered(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        return store.mark_delivered(KEY, token=token), {"delivered": True}

    def _requeue(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = None if scene.token is None else record.token + scene.token
        found = store.requeue(KEY, deadline_ms=self.delay_ms, token=token, note=NOTE)
        assert found is None or found == store.get(KEY)
        return found is not None, {"note": NOTE}

    def _sweep(self, store: Store, _: Scene, record: Record) -> tuple[str, Fields]:
        report = store.sweep(limit=10, requeue_ms=self.delay_ms)
        swept = (*report.interrupted, *report.requeued)
        assert all(each == store.get(KEY) for each in swept)
        word = "interrupted" if report.interrupted else "requeued" if swept else "none"
        brought: Fields = {"swept": True} if record.state is State.PROCESSING else {}
        return word, brought

    def _forget(self, store: Store, scene: Scene, record: Record) -> tuple[bool, Fields]:
        token = record.token + (scene.token or 0)
        state = _another(record.state) if scene.another_state else record.state
        return store.forget(KEY, token=token, state=state), {}


def _another(state: State) -> State:
    return State.QUEUED if state is State.FAILED else State.FAILED
