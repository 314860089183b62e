"""The contract of `list` and `stats`: what an operator sees."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from celery_idempotent.records import Identity, Record, Selection, SettleRequest, State
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    VALUE,
    Advance,
    ContractBase,
)

EVERY = tuple(state.name for state in State)


class ListingContract(ContractBase):
    """Lists, page by page, and counts."""

    def pages(self, store: Store, selection: Selection, **how: int) -> list[tuple[Record, ...]]:
        """Return the pages of a whole list."""
        pages, cursor = [], ""
        while True:
            page = store.list(selection, cursor=cursor, **how)
            pages.append(page.records)
            cursor = page.cursor
            if not cursor:
                return pages
            assert len(pages) < 1000, "the list does not end"

    def keys(self, store: Store, selection: Selection, **how: int) -> list[str]:
        """Return the keys of a whole list, sorted."""
        pages = self.pages(store, selection, **how)
        return sorted(record.identity.key for page in pages for record in page)

    def make(self, store: Store, state: str, key: str) -> Record:
        """Bring a key of its own into a state."""
        identity = dataclasses.replace(KEY, key=key)
        if state == "QUEUED":
            return self.reserve(store, identity)
        record = self.claim(store, identity)
        if state == "INTERRUPTED":
            assert store.interrupt(identity, token=record.token)
        elif state != "PROCESSING":
            assert self.settle(store, record, State[state])  # type: ignore[arg-type]
        return self.found(store, identity)

    @pytest.mark.parametrize("letter", ["я", "漢", "\N{MONEY BAG}"])
    def test_a_long_note_hides_no_other_field(self, store: Store, letter: str) -> None:
        """As long as an operator's may be, in letters that take many bytes."""
        claimed = self.claim(store)
        end = SettleRequest(
            record=claimed,
            state=State.FAILED,
            value=VALUE,
            keep_ms=60_000,
            restore=False,
            note=letter * 600,
        )
        assert store.settle(end)
        (listed,) = store.list(Selection(states=frozenset({State.FAILED}))).records
        assert listed == dataclasses.replace(self.found(store), value=None)

    def test_failures_are_listed_by_the_class_of_their_error(
        self, store: Store, advance: Advance
    ) -> None:
        errors = {"a": "Declined: no funds", "b": "Declined", "c": "Declined2: я\u2028" + "x" * 180}
        for key, error in errors.items():
            claimed = self.claim(store, dataclasses.replace(KEY, key=key))
            assert self.settle(store, claimed, State.FAILED, error=error)
        assert self.keys(store, Selection(error="Declined")) == ["a", "b"]
        (listed,) = store.list(Selection(error="Declined2")).records
        assert listed.error == self.found(store, listed.identity).error == errors["c"]
        advance(self.lease_ms + self.keep_ms + 1)
        assert self.claim(store, listed.identity).error == ""

    def test_each_state_lists_its_own(self, store: Store) -> None:
        for state in EVERY:
            self.make(store, state, state)
        for state in EVERY:
            assert self.keys(store, Selection(states=frozenset({State(state)}))) == [state]
        some = frozenset({State.PROCESSING, State.FAILED})
        assert self.keys(store, Selection(states=some)) == ["FAILED", "PROCESSING"]
        trouble = frozenset({State.INTERRUPTED, State.FAILED})
        assert self.keys(store, Selection(states=trouble), limit=1) == ["FAILED", "INTERRUPTED"]
        assert self.keys(store, Selection()) == sorted(EVERY)

    @pytest.mark.parametrize("states", [{State.PROCESSING}, {State.FAILED}, {State.COMPLETED}])
    def test_pages_together_hold_every_record_once(self, store: Store, states: set[State]) -> None:
        """Also where many records have the same time: a cursor that is a time alone skips some of them, or repeats
        them.
        """
        (state,) = states
        wanted = [f"{n:03}" for n in range(60)]
        for key in wanted:
            self.make(store, state.value, key)
        selection = Selection(states=frozenset(states))
        pages = self.pages(store, selection, limit=7)
        assert all(len(page) <= 7 for page in pages)
        assert sorted(record.identity.key for page in pages for record in page) == wanted

    def end_badly(self, store: Store, claimed: Record, state: str, keep_ms: int) -> None:
        """End a claim in this state; a FAILED one is kept for this time, any other for as long as its claim says."""
        if state == "FAILED":
            assert self.settle(store, claimed, State.FAILED, keep_ms=keep_ms)
        else:
            assert store.interrupt(claimed.identity, token=claimed.token)

    @pytest.mark.parametrize("state", ["INTERRUPTED", "FAILED"])
    def test_what_ended_badly_is_listed_newest_first(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """Operators look for what has just happened, however long it is kept, and whenever it was claimed. Other
        states come in the order that is cheapest for the store.
        """
        wanted = [dataclasses.replace(KEY, key=f"{n:03}") for n in range(12)]
        keeps = [self.keep_ms * (1 + n % 3) for n in range(12)]
        claims = [self.claim(store, wanted[n], keep_ms=keeps[n]) for n in range(12)]
        for n in reversed(range(12)):
            self.end_badly(store, claims[n], state, keeps[n])
            advance(5)
        selection = Selection(states=frozenset({State(state)}))
        pages = self.pages(store, selection, limit=5)
        assert [each.identity for page in pages for each in page] == wanted
        since_ms = self.found(store, wanted[4]).updated_ms
        since = dataclasses.replace(selection, since_ms=since_ms)
        assert self.keys(store, since) == [each.key for each in wanted[:5]]

    @pytest.mark.parametrize("state", ["INTERRUPTED", "FAILED"])
    def test_what_ended_badly_is_found_without_looking_at_others(
        self, store: Store, state: str
    ) -> None:
        """With a million records that completed, a list of ten failures must not read them all."""
        others = [each for each in EVERY if each != state]
        for n in range(40):
            self.make(store, others[n % len(others)], f"{n:03}")
        self.make(store, state, "wanted")
        page = store.list(Selection(states=frozenset({State(state)})), look_at=2)
        assert [record.identity.key for record in page.records] == ["wanted"]
        assert page.looked_at <= 2

    @pytest.mark.parametrize("state", ["INTERRUPTED", "FAILED"])
    def test_what_ended_badly_and_is_over_is_not_counted(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """An index may still have them until the next prune, also where others are kept for longer."""
        kept, keep_ms = ["kept 0", "kept 1", "kept 2"], 9 * self.keep_ms
        for key in kept:
            claimed = self.claim(store, dataclasses.replace(KEY, key=key), keep_ms=keep_ms)
            self.end_badly(store, claimed, state, keep_ms)
        self.make(store, state, "over")
        advance(self.lease_ms + self.keep_ms + 1)
        store.prune(limit=100)
        stats = store.stats()
        assert stats.interrupted + stats.failed == len(kept)
        assert self.keys(store, Selection(states=frozenset({State(state)}))) == kept

    def test_a_page_looks_at_so_many_keys_only(self, store: Store) -> None:
        """A filter that nothing matches would read the whole store in one call, and block it. The page is empty, and
        its cursor says where to go on.
        """
        for n in range(30):
            self.make(store, "PROCESSING", f"{n:03}")
        selection = Selection(states=frozenset({State.PROCESSING}), scopes=frozenset({"nobody's"}))
        page = store.list(selection, look_at=10)
        assert page.records == ()
        assert page.looked_at <= 10
        assert page.cursor
        assert self.keys(store, selection, look_at=10) == []

    def test_by_namespace_scope_key_and_age(self, store: Store, advance: Advance) -> None:
        self.claim(store)
        other = Identity(namespace="payments.refund", scope="acct_2", key="late")
        advance(self.lease_ms / 4)
        late = self.claim(store, other)
        acct_2 = frozenset({"acct_2"})
        assert self.keys(store, Selection(namespace="payments.charge")) == ["order-17"]
        assert self.keys(store, Selection(scopes=acct_2)) == ["late"]
        assert self.keys(store, Selection(scopes=acct_2 | {KEY.scope})) == ["late", "order-17"]
        assert self.keys(store, Selection(namespace="payments.charge", scopes=acct_2)) == []
        assert self.keys(store, Selection(keys=frozenset({"late", "nowhere"}))) == ["late"]
        assert self.keys(store, Selection(before_ms=late.updated_ms)) == ["order-17"]
        assert self.keys(store, Selection(since_ms=late.updated_ms)) == ["late"]

    def test_counts(self, store: Store, advance: Advance) -> None:
        self.make(store, "PROCESSING", "stale")
        advance(self.lease_ms + 1)
        for state in ("PROCESSING", "QUEUED", "COMPLETED", "FAILED", "INTERRUPTED"):
            self.make(store, state, state)
        stats = store.stats()
        assert (stats.live, stats.stale, stats.interrupted, stats.failed) == (2, 1, 1, 1)
        assert stats.queued in (None, 1)
        store.sweep(limit=10)
        stats = store.stats()
        assert (stats.live, stats.stale, stats.interrupted, stats.failed) == (2, 0, 2, 1)

    def test_a_cursor_of_another_list_is_refused(self, store: Store) -> None:
        """A cursor comes back from a URL. Whatever is in it, it is an error for people, never part of a statement."""
        with pytest.raises(ValueError, match="cursor"):
            store.list(Selection(), cursor="'; drop")

    def test_counters_add_up(self, store: Store) -> None:
        """Each process adds what it has counted, to the minute and the hour by the store's clock: machines may have
        other clocks.
        """
        counting, error = self.counting(store), f"failed:{'E' * 80}"
        assert list(counting.counts(hours=24)) == list(counting.counts(minutes=60)) == []
        counting.count({("payments.charge", "settled"): 2, ("payments.charge", "replayed"): 1})
        counting.count({("payments.charge", "settled"): 3, ("a task, with blanks", error): 1})
        for asked, ms in (({"hours": 2}, 3_600_000), ({"minutes": 2}, 60_000)):
            sums: Counter[tuple[str, str]] = Counter()
            for counted in counting.counts(**asked):  # a period may have ended meanwhile
                sums[counted.task, counted.outcome] += counted.count
                assert counted.start_ms % ms == 0
                assert 0 <= store.stats().now_ms - counted.start_ms < 2 * ms
            assert sums == {
                ("a task, with blanks", error): 1,
                ("payments.charge", "settled"): 5,
                ("payments.charge", "replayed"): 1,
            }

    def test_counters_of_minutes_end_before_those_of_hours(
        self, store: Store, advance: Advance
    ) -> None:
        counting = self.counting(store)
        for task in ("old", "new", "last"):
            counting.count({(task, "claimed"): 1})
            advance(61 * 60_000)
        for asked, found in ((60, []), (9999, ["last"])):
            assert [each.task for each in counting.counts(minutes=asked)] == found, asked
        for asked, found in ((1, []), (9999, ["old", "new", "last"])):
            assert [each.task for each in counting.counts(hours=asked)] == found, asked

    def test_the_end_of_the_last_sweep_is_known(self, store: Store, advance: Advance) -> None:
        counting = self.counting(store)
        assert store.stats().swept_ms is None
        counting.note_sweep()
        first = store.stats()
        assert first.swept_ms is not None
        assert 0 <= first.now_ms - first.swept_ms < 2000
        advance(5)
        counting.note_sweep()
        second = store.stats()
        assert second.swept_ms is not None
        assert second.swept_ms >= first.swept_ms + 5
        assert [store.health().problem for _ in range(2)] == [None, None]
        assert list(counting.counts(hours=24)) == []

    def counting(self, store: Store) -> Store:
        """Return the store as one that counts, which is no duty."""
        if not store.supports_counting:
            pytest.skip("this store keeps no counters")
        return store
