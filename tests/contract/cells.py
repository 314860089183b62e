"""The contract of every verb in every state: each rule of the table, by the model's shortest way to it.

The model of a key (`tests/proof/model.py`) says by which calls a record comes to where a rule decides. A test asks
them of the store and of the table alone, and compares answers and records. A store that fails here does something else
than the table says in the state, and under the condition, that the test's id names: ``claim PROCESSING before its
deadline``.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from celery_idempotent.records import (
    ClaimRequest,
    Identity,
    Record,
    ReserveRequest,
    Selection,
    SettleRequest,
    State,
    Stored,
    SweepReport,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.table import Fields, Rule, StoredRecord, Verb
from tests.contract.base import (
    KEY,
    OTHER_FINGERPRINT,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
)
from tests.proof import model
from tests.proof.replay import SMALL, Replay, Stand, graph_of, shape
from tests.support.tiers import THOROUGH

NOTE = "complete by alice: the bank has it"
#: The attempt of the claim that is there.
MINE = b"attempt1"
ENDING = Stored(content_type="text/plain", content_encoding="utf-8", body=b"an end")

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


Way = tuple[model.Call, ...]


@cache
def ways() -> dict[str, Way]:
    """Return a shortest way to each rule in each state that it decides in, by their names."""
    graph, found = graph_of(SMALL), dict[str, Way]()
    reached: dict[int, Way] = {0: ()}
    for node in (queue := [0]):
        for call, after in graph.get(node, {}).items():
            way = (*reached[node], call)
            if after not in reached:
                reached[after] = way
                queue.append(after)
            if call.verb != "tick":
                found.setdefault(f"{call.verb} {shape(node)} {call[1:5]} {call.scope}", way)
    return {_deciding(way): way for way in reversed(found.values())}


def _deciding(way: Way) -> str:
    """Return the name of the rule that decides at the end of a way."""
    decided: list[tuple[Rule, StoredRecord | None]] = []
    decide = table.decide

    def noted(verb: Verb, stored: StoredRecord | None, *args: Any) -> Rule:
        decided.append((decide(verb, stored, *args), stored))
        return decided[-1][0]

    replay = Replay(Stand("the table", model.TableStore()))
    with patch.object(table, "decide", noted):
        for call in way:
            replay.ask_table(call)
    rule, stored = decided[-1]
    return f"{rule.verb} {stored.record.state.name if stored else 'none'} {rule.when}"


class LooseReplay(Replay):
    """Compares all but times, at a clock that goes on; the store's tokens are larger where the table's are."""

    def __init__(self, store: Store, advance: Advance, tick_ms: int) -> None:
        super().__init__(Stand("the store", store))
        self.advance, self.tick_ms = advance, tick_ms
        self.tokens: dict[int, int] = {0: 0}

    def ask(self, call: model.Call, *, look: bool = True) -> None:
        if call.verb == "tick":
            self.stand.clock.advance(int(call.how))
            self.advance(self.tick_ms * int(call.how) / model.TICK + 1)
        else:
            _, attempt, token, claim = self.question(call)
            ours = self.ask_table(call)
            if token is not None:
                own = token - (call.token or 0)
                token = self.tokens.get(own, own) + (call.token or 0)
            if claim is not None:
                claim = dataclasses.replace(claim, token=token)
            question = call, attempt, token, claim, self.tick_ms
            self._alike(ours, model.perform(self.stand.store, *question))
        if look:
            self.look()

    def look(self) -> None:
        self.table.now_us = self.stand.clock()
        self._alike(self.table.get(model.KEY), self.stand.store.get(model.KEY))

    def _alike(self, ours: Any, theirs: Any) -> None:
        assert self._timeless(ours, ours=True) == self._timeless(theirs), " · ".join(self.trail)
        for name in ("left_ms", "age_ms"):
            if hasattr(ours, name):
                wanted = getattr(ours, name) * self.tick_ms / model.TICK
                assert abs(getattr(theirs, name) - wanted) < self.tick_ms / 2, name

    def _timeless(self, answer: Any, *, ours: bool = False) -> Any:
        if isinstance(answer, SweepReport):
            return [
                self._timeless(each, ours=ours) for each in answer.interrupted + answer.requeued
            ]
        if isinstance(answer, Record):
            if ours and answer.token not in self.tokens:
                found = self.stand.store.get(model.KEY)
                assert found is not None
                assert found.token > max(self.tokens.values())
                # So tokens grow also over a store that has lost all its data: the clock has gone on.
                assert found.token >= found.created_ms * 1000
                self.tokens[answer.token] = found.token
            token = self.tokens[answer.token] if ours else answer.token
            has_deadline: Any = answer.deadline_ms is not None
            times: Fields = {"created_ms": 0, "updated_ms": 0, "deadline_ms": has_deadline}
            return dataclasses.replace(answer, token=token, **times)
        if hasattr(answer, "record"):
            return type(answer), self._timeless(answer.record, ours=ours)
        return answer


class CellContract(ContractBase):
    """Every rule of the table, in every state that it is for."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "way" in metafunc.fixturenames:
            found = ways()
            if self.few_cells and not THOROUGH:
                # One for each verb and state: the same table decides on all others.
                found = {" ".join(name.split(" ")[:2]): way for name, way in found.items()}
            metafunc.parametrize("way", found.values(), ids=found)

    def test_a_verb_does_what_the_table_says(
        self, store: Store, advance: Advance, way: Way
    ) -> None:
        replay = LooseReplay(store, advance, self.lease_ms)
        for call in way:
            replay.ask(call)
        record = store.get(model.KEY)
        # A sweep has nothing to send for a reservation without a message, and may take it from its index.
        waits = record is not None and record.state is State.QUEUED and record.message is None
        if way[-1].verb != "tick" and not (way[-1].verb == "sweep" and waits):
            store.prune(limit=10)
            self.is_indexed(store, record)
        # It lives as long, to half a tick.
        for _ in range(8):
            if replay.table.stored is None:
                break
            replay.ask(model.Call("tick", how=f"{model.TICK}"))

    def is_indexed(self, store: Store, record: Record | None) -> None:
        """Check that the only record is counted and listed as what it is: some stores do that by indexes."""
        stats, where = store.stats(), ""
        if record is not None:
            where = record.state.name.lower()
            if record.deadline_ms is not None:
                where = "live" if record.deadline_ms > stats.now_ms else "stale"
            (listed,) = store.list(Selection(states=frozenset({record.state}))).records
            assert listed == dataclasses.replace(record, value=None, message=None, steps=())
        for each in ("live", "stale", "interrupted", "failed"):
            assert getattr(stats, each) == (each == where), each

    @pytest.mark.parametrize("kind", table.BROUGHT)
    def test_no_field_of_a_request_is_lost(self, store: Store, kind: type[table.Request]) -> None:
        """Each field alone, as some lead away from a verb's fast path, then all together."""
        names = [name for name, path in table.BROUGHT[kind].items() if path == name != "identity"]
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
