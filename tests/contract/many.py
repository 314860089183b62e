"""The contract beyond one key and one client: many at once, many keys, any text and bytes, and tokens that grow."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from celery_idempotent.records import (
    Claimed,
    Held,
    Identity,
    Record,
    Renewal,
    Reserved,
    Selection,
    Settled,
    State,
    Stored,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    FINGERPRINT,
    KEY,
    MESSAGE,
    NAMES,
    Advance,
    ContractBase,
)
from tests.support.threads import all_at_once, crowd

DAY_MS = 24 * 3_600_000


def result(text: str) -> Stored:
    """Return the result of a step."""
    return Stored(content_type="application/json", content_encoding="utf-8", body=text.encode())


#: Each would meet another one if names were made by joining.
CONFUSABLE = [
    Identity(namespace=namespace, scope=scope, key=key)
    for namespace, scope, key in (
        ("a", "", "b:c"),
        ("a", "b", "c"),
        ("a:b", "", "c"),
        ("a:b", "c", ""),
        ("a", "b:c", ""),
        ("a", "", "b%3Ac"),
        ("a%3Ab", "", "c"),
        ("a%253Ab", "", "c"),
        ("a", "b%3Ac", ""),
        ("a", "{1}", "c"),
        ("a", "", "{1}c"),
        ("a", "", "1"),
        ("a", "", "01"),
        ("a", "", '"1"'),
        ("a", "", "1 "),
        ("a", "1", "1"),
        ("A", "", "1"),
        ("a", "", "\u00e9"),
        ("a", "", "e\u0301"),
    )
    if key
]
UNUSUAL = [
    "x" * 255,
    "\u20ac" * 255,
    "\U0001f600",
    "{}{7}",
    "}:{",
    "a b",
    "%",
    "%s%d",
    "*?[a-z]",
    "!leases",
    "'; --",
    "../..",
]


class ManyContract(ContractBase):
    """Many clients, keys and values."""

    def test_tokens_grow_with_every_claim(self, store: Store, advance: Advance) -> None:
        """Outside systems refuse a token that is older than one they have seen (fencing). A token that is given twice,
        or that shrinks after the record was deleted, would let a late worker through, or keep the right one out.
        Clocks are corrected, and a replica that takes over has another clock: the last token must outlive its record.
        """
        record = self.claim(store)
        tokens = [record.token]
        back = ("release, the clock steps back", "forget, the clock steps back")
        for end in ("release", "forget", "stale", "interrupt", "expire", "settle", *back, *back):
            if end.startswith("release"):
                assert store.release(KEY, token=record.token)
            elif end.startswith("forget"):
                assert store.forget(KEY)
            elif end == "stale":
                advance(self.lease_ms + 1)
            elif end == "interrupt":
                assert store.interrupt(KEY, token=record.token)
            elif end == "expire":
                advance(self.lease_ms + self.keep_ms + 1)
            else:
                assert self.settle(store, record)
                advance(self.keep_ms + 1)
            if end in back:
                self.set_back(advance)
            record = self.claim(store)
            tokens.append(record.token)
        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
    def test_tokens_grow_after_a_late_settle_brought_back_an_older_one(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """A claim that was given back settles after a newer one was given back as well."""
        late = self.claim(store)
        assert store.release(KEY, token=late.token)
        newer = self.claim(store)
        assert store.release(KEY, token=newer.token)
        assert self.settle(store, late, State[state])  # type: ignore[arg-type]
        assert store.forget(KEY)
        self.set_back(advance)
        assert self.claim(store).token > newer.token

    @pytest.mark.parametrize("verb", ["claim", "reserve"])
    def test_of_many_at_once_one_wins(self, store: Store, advance: Advance, verb: str) -> None:
        """The reason for all of this: look and write are one step, or two workers find the key free at once. After a
        machine is lost, all its messages come back to many workers at once.
        """
        ask = self.try_claim if verb == "claim" else self.try_reserve
        with crowd(self.many) as together:
            for crashes in range(2):

                def do(n: int, turn: int = crashes) -> object:
                    return ask(store, task_id=f"{turn} {n}")

                answers = together(do)
                (winner,) = [each for each in answers if isinstance(each, (Claimed, Reserved))]
                held = [each for each in answers if isinstance(each, Held)]
                assert len(held) == self.many - 1
                assert {each.record.token for each in held} == {winner.record.token}
                assert winner.record.crashes == crashes * (verb == "claim")
                advance(self.lease_ms + 1)

    def test_of_a_reservation_and_a_claim_at_once_the_claim_holds(self, store: Store) -> None:
        """A publisher reserves for a message while another message of the same key begins to run. The reservation must
        not overwrite the claim, and comes out as Reserved only if it was first.
        """
        with crowd(2) as together:
            for name in NAMES[:20]:

                def do(who: int, name: Identity = name) -> object:
                    return (self.try_claim, self.try_reserve)[who](store, name)

                claimed, reserved = together(do)
                assert isinstance(claimed, Claimed)
                assert isinstance(reserved, (Reserved, Held))
                assert store.get(name) == claimed.record

    def test_of_a_settle_and_a_takeover_at_once_one_wins(
        self, store: Store, advance: Advance
    ) -> None:
        """Both look at a stale record. If both succeeded, the effect would happen twice with a result recorded for the
        first.
        """
        with crowd(2) as together:
            for name in NAMES[:20]:
                zombie = self.claim(store, name)
                advance(self.lease_ms + 1)

                def do(who: int, zombie: Record = zombie) -> object:
                    if who:
                        return self.settle(store, zombie)
                    return self.try_claim(store, zombie.identity)

                claimed, settled = together(do)
                assert isinstance(claimed, Claimed) is not settled

    def test_each_lease_is_answered_in_its_place(self, store: Store) -> None:
        """The heartbeat renews all claims of a process in one call. A claim that takes another one's answer is lost, or
        is believed to live, by mistake.
        """
        names = [dataclasses.replace(KEY, key=f"order-{n}") for n in range(40)]
        leases: list[Renewal] = []
        for n, name in enumerate(names):
            record = self.claim(store, name)
            leases.append(self.lease(record, token=record.token + n % 2))
        others = [store.get(name) for name in names[1::2]]
        assert store.renew(leases) == [True, False] * 20
        assert store.renew(leases) == [True, False] * 20
        assert [store.get(name) for name in names[1::2]] == others

    def test_a_renewal_lengthens_the_lease_and_the_life_of_its_record(
        self, store: Store, advance: Advance
    ) -> None:
        """A run may be longer than its first lease and life. One whose record is gone has lost its claim."""
        record = self.claim(store)
        advance(self.lease_ms // 2)
        assert self.renew(store, record)
        advance(self.lease_ms * 3 // 4)
        assert isinstance(self.try_claim(store), Held)
        advance(self.keep_ms - self.lease_ms // 4)
        assert store.get(KEY) is not None
        advance(self.lease_ms)
        assert not self.renew(store, record)
        assert not store.mark_delivered(KEY, token=record.token)

    def test_an_owner_is_told_that_an_operator_settled(self, store: Store) -> None:
        """Its own result is not the one that duplicates get, so its call goes on as a duplicate."""
        record = self.claim(store)
        assert self.settle(store, record, note="sent by hand", restore=False)
        assert self.found(store).token > record.token
        assert not self.settle(store, record)

    @pytest.mark.parametrize("body", [b"", b"S\0\0\0\1M", bytes(range(256)), b"x" * 1024 * 1024])
    def test_any_step_comes_back_as_it_was(self, store: Store, body: bytes) -> None:
        token = self.claim(store, message=MESSAGE).token
        values = [
            Stored(content_type="application/x-python-serialize", content_encoding="binary", body=b)
            for b in (body, b"", body)
        ]
        for name, value in zip(("", "p", "\u20ac" * 100), values, strict=True):
            assert store.checkpoint(KEY, token=token, name=name, value=value)
        found = self.found(store)
        assert [value for _, value in found.steps] == values
        assert [name for name, _ in found.steps] == ["", "p", "\u20ac" * 100]
        assert found.message == MESSAGE

    def test_steps_at_once_are_all_kept(self, store: Store) -> None:
        """A body may take its steps in threads. A store that reads all steps and writes them back would lose some."""
        token = self.claim(store).token

        def do(n: int) -> bool:
            return store.checkpoint(KEY, token=token, name=f"{n % 10}", value=result(f"{n}"))

        assert all(all_at_once(30, do))
        steps = self.found(store).steps
        assert sorted(name for name, _ in steps) == [f"{n}" for n in range(10)]

    @pytest.mark.parametrize("late_ms", [-1, 0, 1])
    def test_every_verb_calls_a_lease_over_at_the_same_millisecond(
        self, store: Store, stop_at: Callable[[int], None], late_ms: int
    ) -> None:
        """If a claim used ``<`` and a sweep ``<=``, there would be a moment in which a record is alive for one and dead
        for the other: a run could be taken over and renewed at once.
        """
        stop_at(self.claim(store).updated_ms)
        store.forget(KEY)
        claimed, requeued, swept, called = (
            self.claim(store, name, on_stale="requeue", message=MESSAGE) for name in NAMES[:4]
        )
        reserved = self.reserve(store, NAMES[4])
        assert claimed.deadline_ms == requeued.deadline_ms == reserved.deadline_ms
        assert claimed.deadline_ms is not None
        stop_at(claimed.deadline_ms + late_ms)
        over, left_ms = late_ms >= 0, max(-late_ms, 0)

        stats = store.stats()
        assert (stats.live, stats.stale) == ((0, 5) if over else (5, 0))
        assert len(store.list(Selection(stale=True)).records) == (4 if over else 0)
        for name, found in ((NAMES[3], called), (NAMES[4], reserved)):
            answer = self.try_reserve(store, name, task_id="another")
            assert isinstance(answer, Reserved) is over
            assert over or answer == Held(found, left_ms=left_ms)
        claim = self.try_claim(store, NAMES[0])
        assert isinstance(claim, Claimed) is over
        assert over or claim == Held(claimed, left_ms=left_ms)
        assert (store.requeue(NAMES[1], deadline_ms=self.lease_ms) is not None) is over
        report = store.sweep(limit=10, requeue_ms=self.lease_ms)
        assert [record.identity for record in report.requeued] == ([swept.identity] if over else [])

    def test_the_times_doubled_are_counted_over_claims(
        self, store: Store, advance: Advance
    ) -> None:
        """A task that kills its worker each time is published ever more rarely, though each copy is claimed."""
        for doubled in range(3):
            self.claim(store, on_stale="requeue", message=MESSAGE)
            advance(self.lease_ms + 1)
            (record,) = store.sweep(limit=10, requeue_ms=1000).requeued
            assert record.deadline_ms == record.updated_ms + 1000 * 2**doubled
            assert record.crashes == doubled + 1

    def test_a_reservation_says_whether_its_transaction_may_be_rolled_back(
        self, store: Store
    ) -> None:
        """A request that meets an uncommitted one waits for its COMMIT instead of promising that the task will run."""
        for uncommitted in (True, False, True):
            record = self.reserve(store, uncommitted=uncommitted)
            assert record.uncommitted is uncommitted
            assert self.found(store) == record
        assert self.claim(store).uncommitted is False

    def test_a_key_that_was_reserved_waits_for_its_retry(self, store: Store) -> None:
        """Also where the publisher kept no message: the retry is on its way."""
        self.reserve(store)
        claimed = self.claim(store)
        assert store.release(KEY, token=claimed.token, requeue_ms=self.lease_ms)
        assert self.found(store).state is State.QUEUED

    def test_an_owner_that_comes_back_settles_for_the_copy_that_a_sweep_sent(
        self, store: Store, advance: Advance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy may wait in its queue for longer than the end is usually kept."""
        monkeypatch.setattr(table, "COPIES_MS", DAY_MS)  # the model has none
        record = self.claim(store, task_id="first", on_stale="requeue", message=MESSAGE)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10, requeue_ms=self.lease_ms).requeued
        assert self.renew(store, record)
        assert self.settle(store, record, keep_ms=1)
        advance(self.keep_ms)
        assert isinstance(self.try_claim(store, task_id="first"), Settled)

    @pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
    def test_limited_sweeps_reach_everything_in_the_end(
        self, store: Store, advance: Advance, on_stale: str
    ) -> None:
        """After an outage there may be a million stale records. A sweep does a part, and asks to be called again. One
        that began at the start each time, and met ten records that it may not touch, would never come further.
        """
        for name in NAMES:
            self.claim(store, name, on_stale=on_stale, message=MESSAGE)
        advance(self.lease_ms + 1)
        swept: Counter[Identity] = Counter()
        for _ in range(10 * len(NAMES)):
            report = store.sweep(limit=10, requeue_ms=self.lease_ms)
            found = report.requeued if on_stale == "requeue" else report.interrupted
            assert len(found) <= 10
            swept.update(record.identity for record in found)
            if not report.more:
                break
        assert swept == Counter(NAMES)

    def test_sweeps_and_claims_at_once_count_each_crash_once(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep and a claim may find the same stale record. The one that writes counts the crash; the other looks
        again.
        """
        for name in NAMES:
            self.claim(store, name)
        advance(self.lease_ms + 1)

        def do(who: int) -> None:
            if who % 2:
                store.sweep(limit=1000)
            else:
                for name in NAMES:
                    self.try_claim(store, name)

        all_at_once(6, do)
        found = Counter(
            (record.state, record.crashes, record.attempts) for record in self.known(store, NAMES)
        )
        assert found == {(State.PROCESSING, 1, 2): len(NAMES)}

    def test_prunes_end(self, store: Store, advance: Advance) -> None:
        """``prune`` is called until it returns 0. A store that deletes by itself may return 0 at once."""
        for name in NAMES:
            self.settle(store, self.claim(store, name), State.FAILED)
        advance(self.keep_ms + 1)
        for _ in range(50):
            if not store.prune(limit=10):
                break
        assert store.prune(limit=10) == 0
        assert self.known(store, NAMES) == []

    def test_a_closed_store_may_be_used_again(self, store: Store) -> None:
        """An app is closed in a test, or before a fork, and used again. Connections are then opened anew."""
        record = self.claim(store)
        store.close()
        store.close()
        assert store.get(KEY) == record

    @pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
    def test_sweeps_at_once_return_each_record_once(
        self, store: Store, advance: Advance, on_stale: str
    ) -> None:
        """Sweeps may overlap, and several machines may run one. Each interruption is told and counted; two copies of
        one message would do no harm, thousands would.
        """
        for name in NAMES:
            self.claim(store, name, on_stale=on_stale, message=MESSAGE)
        with crowd(8) as together:
            for _ in range(2 if on_stale == "requeue" else 1):
                advance(self.lease_ms + 1)
                reports = together(lambda _: store.sweep(limit=1000, requeue_ms=self.lease_ms))
                swept = [
                    each for report in reports for each in report.requeued + report.interrupted
                ]
                assert Counter(record.identity for record in swept) == Counter(NAMES)
                assert {record.crashes for record in self.known(store, NAMES)} == {1}
                advance(self.lease_ms)

    def test_identities_that_look_alike_stay_apart_and_are_swept_as_claimed(
        self, store: Store, advance: Advance
    ) -> None:
        """A store that joins the parts by a separator takes ``("a", "b:c")`` and ``("a:b", "c")`` for one key; a
        database may compare without case, accents or trailing blanks. Then one customer would get the result of
        another. A sweep may know no more of a record than the name that the store made, and takes that apart again.
        """
        records = [self.claim(store, identity) for identity in CONFUSABLE]
        for identity, record in zip(CONFUSABLE, records, strict=True):
            assert store.get(identity) == record
        for identity in CONFUSABLE[::2]:
            assert store.forget(identity)
        assert self.known(store, CONFUSABLE) == records[1::2]
        for identity in CONFUSABLE[::2]:
            self.claim(store, identity)
        advance(self.lease_ms + 1)
        swept = store.sweep(limit=1000).interrupted
        assert {record.identity for record in swept} == set(CONFUSABLE)

    @pytest.mark.parametrize("key", UNUSUAL)
    def test_any_printable_key_is_kept_as_it_is(self, store: Store, key: str) -> None:
        """Keys come from clients: they may look like a pattern, a statement, a path or a Redis hash tag. Task ids and
        host names are any text, too: nothing may rely on UUIDs, on ASCII or on a length.
        """
        identity, owner = Identity(namespace="tasks.charge", scope=key, key=key), key * 4
        record = self.claim(store, identity, task_id=owner, worker=owner)
        assert (record.identity, record.task_id, record.worker) == (identity, owner, owner)
        assert store.get(identity) == record
        assert self.settle(store, record)
        assert self.found(store, identity).task_id == owner

    @pytest.mark.parametrize(
        "value",
        [
            None,
            ("application/json", "utf-8", b""),
            ("application/json", "utf-8", b"x" * 1024 * 1024),
            ("application/x-python-serialize", "binary", bytes(range(256))),
            ("application/x-msgpack", "binary", b"\x00"),
            ("application/vnd.example+json", "utf-16", "\u20ac".encode("utf-16")),
            ("", "", b"\r\n$5\r\n"),
        ],
        ids=["none", "empty", "1 MiB", "binary", "zero", "unusual type", "no type"],
    )
    @pytest.mark.parametrize("fingerprint", [None, FINGERPRINT])
    def test_any_value_comes_back_as_it_was(
        self, store: Store, value: tuple[str, str, bytes] | None, fingerprint: bytes | None
    ) -> None:
        """A value is bytes with a type, which no store may read, convert or cut; it need not be kept."""
        kept = value and Stored(content_type=value[0], content_encoding=value[1], body=value[2])
        assert self.settle(store, self.claim(store, fingerprint=fingerprint), value=kept)
        answer = self.try_claim(store)
        assert isinstance(answer, Settled)
        assert (answer.record.value, answer.record.fingerprint) == (kept, fingerprint)
        assert self.found(store) == answer.record
