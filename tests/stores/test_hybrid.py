"""HybridStore keeps the contract; a settled key costs one look at the cache, whatever the cache does costs no more."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Mismatched,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.forwarding import ForwardingStore
from celery_idempotent.stores.hybrid import breaker, cache
from celery_idempotent.stores.hybrid.breaker import Breaker
from celery_idempotent.stores.hybrid.cache import Cached, RedisCache, Ticket
from celery_idempotent.stores.hybrid.store import HybridStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.store import RedisStore
from celery_idempotent.testing import FakeClock
from tests.contract import StoreContract
from tests.stores.hybrids import BadLink, Counted, CountingLink, DatedLink
from tests.stores.shifted import FixedLink, Shift

pytestmark = pytest.mark.redis

KEY = Identity(namespace="charge", scope="acct_1", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
FINGERPRINT, OTHER = bytes(16), bytes(range(16))
LEASE_MS, KEEP_MS = 60_000, 120_000


class HybridContract(StoreContract):
    brief = True

    @pytest.fixture
    def cached(self, redis_url: str, prefix: str) -> Iterator[RedisCache]:
        cached = RedisCache(redis_url, prefix=prefix, options={"socket_timeout": 5})
        yield cached
        cached.close()

    @pytest.fixture
    def store(self, cached: RedisCache, truth: Any) -> HybridStore:
        return HybridStore(cached, truth)


class TestBeforeMemory(HybridContract):
    """The clocks of truth and cache are years apart."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def truth(self, clock: FakeClock) -> MemoryStore:
        return MemoryStore(clock)

    @pytest.fixture
    def advance(self, cached: Any, clock: FakeClock, redis_client: redis.Redis) -> Any:
        shift = Shift(cached, redis_client)

        def advance(ms: float) -> None:
            clock.advance(ms)
            shift(ms)

        return advance

    @pytest.fixture
    def stop_at(self, clock: FakeClock) -> Callable[[int], None]:
        return lambda ms: clock.advance(ms - clock() / 1000)


class TestBeforeRedis(HybridContract):
    @pytest.fixture
    def truth(self, redis_url: str, prefix: str) -> Iterator[RedisStore]:
        truth = RedisStore(redis_url, prefix=f"{prefix}-truth")
        yield truth
        truth.close()

    @pytest.fixture
    def advance(self, cached: Any, truth: RedisStore, redis_client: redis.Redis) -> Any:
        shifts = Shift(cached, redis_client), Shift(truth, redis_client)

        def advance(ms: float) -> None:
            for shift in shifts:
                shift(ms)

        return advance

    @pytest.fixture
    def stop_at(self, truth: RedisStore, redis_client: redis.Redis) -> Callable[[int], None]:
        link = FixedLink(truth._link, redis_client, f"{truth.prefix}-clock")
        truth._link = link
        link.set(time.time_ns() // 1000)
        return lambda ms: link.set(ms * 1000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time.time_ns() // 1000)


@pytest.fixture
def truth(clock: FakeClock) -> Any:
    return Counted(MemoryStore(clock))


@pytest.fixture
def store(redis_url: str, prefix: str, truth: Any) -> Iterator[Any]:
    store = HybridStore(RedisCache(redis_url, prefix=prefix, options={"socket_timeout": 5}), truth)
    yield store
    store.close()


@pytest.fixture
def link(store: Any) -> Any:
    store.cache._link = BadLink(store.cache._link)
    return store.cache._link


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause after a failure, so that a test need not wait for one."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0)


def ask(store: Any, **changes: Any) -> Any:
    asked = {
        "attempt": os.urandom(8),
        "lease_ms": LEASE_MS,
        "keep_ms": KEEP_MS,
        "fingerprint": FINGERPRINT,
        "task_id": "another",
    }
    return store.claim(ClaimRequest(identity=KEY, **{**asked, **changes}))


def complete(store: Any, state: Any = State.COMPLETED, **changes: Any) -> Any:
    answer = ask(store, task_id="first")
    assert isinstance(answer, Claimed)
    settled = {"state": state, "value": VALUE, "keep_ms": KEEP_MS, **changes}
    assert store.settle(SettleRequest(record=answer.record, **settled))
    return answer.record


@contextmanager
def nobody_asks(truth: Counted) -> Iterator[None]:
    truth.asked.clear()
    yield
    assert truth.asked == []


@contextmanager
def somebody_asks(truth: Counted, *verbs: str) -> Iterator[None]:
    truth.asked.clear()
    yield
    assert [verb for verb in truth.asked if verb not in ("joined", "get")] == [*verbs]


class TestAnswers:
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    @pytest.mark.parametrize("value", [None, VALUE])
    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_duplicate_of_a_settled_key_costs_one_round_trip_and_asks_the_truth_nothing(
        self, store, truth, state, value, replaced
    ):
        complete(store, state, value=value, replaced=replaced)
        record = store.get(KEY)
        counted = store.cache._link = CountingLink(store.cache._link)
        with nobody_asks(truth):
            answer = ask(store)
        assert isinstance(answer, Settled)
        assert answer.record == record
        assert (answer.record.value, answer.record.replaced) == (value, replaced)
        assert counted.trips == 1

    def test_a_publish_of_a_settled_key_is_answered_by_the_cache(self, store, truth):
        complete(store)
        asked = {"deadline_ms": LEASE_MS, "keep_ms": KEEP_MS, "fingerprint": FINGERPRINT}
        with nobody_asks(truth):
            answer = store.reserve(ReserveRequest(identity=KEY, task_id="another", **asked))
        assert isinstance(answer, Settled)
        with somebody_asks(truth, "reserve"):
            assert isinstance(
                store.reserve(
                    ReserveRequest(identity=KEY, task_id="b", **{**asked, "fingerprint": OTHER})
                ),
                Mismatched,
            )

    def test_its_age_is_by_the_clock_of_the_cache(self, store, truth):
        truth._truth._clock = FakeClock(0)  # since when the truth's clock stands still
        complete(store)
        time.sleep(0.05)
        answer = ask(store)
        assert 40 <= answer.age_ms <= 20_000

    @pytest.mark.parametrize(("known", "asked"), [(None, OTHER), (FINGERPRINT, None)])
    def test_a_fingerprint_that_either_side_lacks_is_equal_to_any(self, store, truth, known, asked):
        record = ask(store, fingerprint=known, task_id="first").record
        store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=KEEP_MS)
        )
        with nobody_asks(truth):
            assert isinstance(ask(store, fingerprint=asked), Settled)

    def test_a_mismatch_is_the_truth_s_to_refuse(self, store, truth):
        complete(store)
        with somebody_asks(truth, "claim"):
            answer = ask(store, fingerprint=OTHER)
        assert answer == Mismatched(store.get(KEY))

    def test_whether_callbacks_were_sent_is_the_truth_s_to_say(self, store, truth, link):
        record = complete(store)
        link.mode = "away"
        assert store.mark_delivered(KEY, token=record.token)
        link.mode = "well"
        store.cache.breaker.succeeded()
        assert store.cache.look(KEY).record.delivered is False
        answer = ask(store, task_id="first")
        assert answer.record.delivered is True
        # And from then on the cache knows.
        with nobody_asks(truth):
            assert ask(store, task_id="first").record.delivered is True

    def test_a_redelivery_of_what_was_delivered_is_answered_by_the_cache(self, store, truth):
        record = complete(store)
        left = store.cache.look(KEY)
        assert store.mark_delivered(KEY, token=record.token)
        assert ask(store, task_id="another").record.delivered is True
        with nobody_asks(truth):
            answer = ask(store, task_id="first")
        assert answer.record == dataclasses.replace(left.record, delivered=True)

    def test_a_mark_is_not_taken_back_by_a_reading_of_before_it(self, store):
        record = complete(store)
        ticket, before = store.cache.ticket(KEY), store.truth.retained(KEY)
        assert store.mark_delivered(KEY, token=record.token)
        assert store.cache.fill(KEY, ticket, before) is False

    def test_an_older_record_does_not_take_the_place_of_a_newer_one(self, store):
        complete(store)
        before = store.truth.retained(KEY)
        assert store.forget(KEY)
        token = complete(store).token
        assert store.cache.fill(KEY, store.cache.ticket(KEY), before) is False
        assert store.cache.look(KEY).record.token == token

    def test_of_a_settle_that_is_repeated_the_first_value_is_cached(self, store):
        record = complete(store)
        another = dataclasses.replace(VALUE, body=b"18")
        store.cache.drop(KEY)
        assert store.settle(
            SettleRequest(record=record, state=State.FAILED, value=another, keep_ms=KEEP_MS)
        )
        assert store.cache.look(KEY).record == store.get(KEY)
        assert store.get(KEY).value == VALUE

    def test_what_redis_keeps_ends_before_the_record_does(self, store, clock, redis_client):
        complete(store, keep_ms=5_000)
        (name,) = redis_client.scan_iter(match=f"{store.cache.prefix}:*:*")
        assert 0 < redis_client.pttl(name) <= 5_000
        store.cache.drop(KEY)
        clock.advance(3_000)
        assert isinstance(ask(store), Settled)
        assert 0 < redis_client.pttl(name) <= 2_000

    def test_a_fill_that_comes_late_does_not_prolong_a_record(self, store, clock, redis_client):
        complete(store, keep_ms=5_000)
        store.cache.drop(KEY)
        ticket, retained = store.cache.ticket(KEY), store.truth.retained(KEY)
        late = dataclasses.replace(ticket, now_ms=ticket.now_ms - 4_000)
        assert store.cache.fill(KEY, late, retained)
        (name,) = redis_client.scan_iter(match=f"{store.cache.prefix}:*:*")
        assert 0 < redis_client.pttl(name) <= 1_000
        store.cache.drop(KEY)
        ticket = store.cache.ticket(KEY)
        too_late = dataclasses.replace(ticket, now_ms=ticket.now_ms - 5_000)
        assert store.cache.fill(KEY, too_late, retained) is False

    @pytest.mark.parametrize(
        "content", [b"", b"S", b"X" * 60, b"C" * 60, "P", b"S" * 23 + b"C\x01" + bytes(15), b"T"]
    )
    def test_an_entry_that_is_none_is_not_believed(self, store, truth, redis_client, content):
        record = complete(store)
        (name,) = redis_client.scan_iter(match=f"{store.cache.prefix}:*:*")
        if isinstance(content, str):
            content = (
                redis_client.get(name)[:23] + b"P\x00" + record.token.to_bytes(7, "big") + bytes(40)
            )
        redis_client.set(name, content)
        assert ask(store).record == store.get(KEY)

    def test_an_entry_that_disagrees_is_replaced_when_the_truth_is_asked(self, store, truth):
        complete(store)
        wrong = dataclasses.replace(store.truth.retained(KEY).record, task_id="nobody", value=None)
        store.cache.drop(KEY)
        retained = dataclasses.replace(store.truth.retained(KEY), record=wrong)
        assert store.cache.fill(KEY, store.cache.ticket(KEY), retained)
        assert isinstance(ask(store, fingerprint=OTHER), Mismatched)
        assert store.cache.look(KEY).record == store.get(KEY)


class TestForget:
    @pytest.mark.parametrize("mode", ["away", "frozen", "deaf"])
    def test_a_forget_fails_and_deletes_nothing_if_the_cache_does_not_take_the_tombstone(
        self, store, truth, link, mode
    ):
        complete(store)
        link.mode = mode
        with somebody_asks(truth), pytest.raises(StoreUnavailable):
            store.forget(KEY)
        assert store.get(KEY) is not None

    def test_what_failed_and_is_completed_leaves_no_copy_of_the_failure(self, store, truth, link):
        complete(store, State.FAILED)
        with nobody_asks(truth):
            assert ask(store).record.state is State.FAILED
        seen = store.get(KEY)
        completed = SettleRequest(
            record=seen, state=State.COMPLETED, value=VALUE, keep_ms=KEEP_MS, restore=False
        )
        link.mode = "away"
        with pytest.raises(StoreUnavailable, match="nothing was completed"):
            store.settle(completed)
        assert store.get(KEY) == seen
        link.mode = "well"
        assert store.settle(completed)
        with nobody_asks(truth):
            assert ask(store).record.state is State.COMPLETED

    def test_a_forget_asks_the_cache_also_while_others_go_without(self, store, link):
        complete(store)
        link.mode = "away"
        assert isinstance(ask(store), Settled)
        assert store.cache.breaker.open
        link.mode = "well"
        assert store.forget(KEY) is True
        assert not store.cache.breaker.open

    def test_a_forget_that_cannot_lift_its_tombstone_fails_and_may_be_repeated(
        self, store, link, truth
    ):
        complete(store)
        forget = truth._truth.forget

        def and_then_away(identity, **only):
            link.mode = "away"
            return forget(identity, **only)

        truth._truth.forget = and_then_away
        with pytest.raises(StoreUnavailable):
            store.forget(KEY)
        assert store.get(KEY) is None
        link.mode = "well"
        truth._truth.forget = forget
        store.cache.breaker.succeeded()
        # The tombstone stands, so nothing is answered and nothing filled.
        assert store.cache.look(KEY) is None
        complete(store)
        assert store.cache.look(KEY) is None
        assert store.forget(KEY) is True
        assert isinstance(store.cache.look(KEY), Ticket)

    @pytest.mark.parametrize("mode", ["away", "frozen", "deaf"])
    @pytest.mark.parametrize("exactly", [False, True], ids=["token", "token-and-state"])
    def test_a_forget_by_token_needs_the_cache_however_long_that_is_away(
        self, store, link, mode, exactly
    ):
        complete(store)
        record = store.get(KEY)
        only = {"token": record.token, **({"state": record.state} if exactly else {})}
        link.mode = mode
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="nothing was forgotten"):
                store.forget(KEY, **only)
            assert store.cache.breaker.open
        assert store.get(KEY) == record
        link.mode = "well"
        assert store.forget(KEY, **only) is True
        assert isinstance(ask(store), Claimed)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_mark_is_forgotten_without_a_dead_cache_and_so_is_a_copy_that_turns_up_again(
        self, store, link, truth, when
    ):
        token = complete(store).token
        forget = truth._truth.forget

        def and_then_away(identity, **only):
            link.mode = "away"
            return forget(identity, **only)

        if when == "before":
            link.mode = "away"
        else:
            truth._truth.forget = and_then_away
        store.forget_mark(KEY, token=token)
        assert store.get(KEY) is None
        link.mode = "well"
        truth._truth.forget = forget
        store.cache.breaker.succeeded()
        if when == "before":
            assert ask(store).record.token == token
        store.forget_mark(KEY, token=token)
        assert isinstance(ask(store), Claimed)

    def test_a_tombstone_stays_until_its_own_forget_lifts_it(self, store, truth):
        complete(store)
        one, two = store.cache.bury(KEY), store.cache.bury(KEY)
        store.cache.lift(KEY, one)
        assert store.cache.look(KEY) is None
        assert store.cache.ticket(KEY) is None
        store.cache.drop(KEY)
        assert store.cache.look(KEY) is None
        assert isinstance(ask(store), Settled)
        store.cache.lift(KEY, two)
        assert isinstance(store.cache.look(KEY), Ticket)

    def test_a_tombstone_that_nobody_lifts_ends(self, store, redis_client):
        store.cache.bury(KEY)
        (name,) = redis_client.scan_iter(match=f"{store.cache.prefix}:*:*")
        assert cache.TOMBSTONE_MS - 5_000 < redis_client.pttl(name) <= cache.TOMBSTONE_MS

    @pytest.mark.parametrize("lifted", [False, True])
    def test_a_forget_is_not_undone_by_a_fill_where_its_tombstone_was_lost(
        self, store, redis_client, lifted
    ):
        complete(store)
        store.cache.drop(KEY)
        ticket, retained = store.cache.ticket(KEY), store.truth.retained(KEY)
        tombstone = store.cache.bury(KEY)
        (name,) = redis_client.scan_iter(match=f"{store.cache.prefix}:*:*")
        redis_client.delete(name)
        if lifted:
            ticket = store.cache.ticket(KEY)
        assert store.truth.forget(KEY)
        if lifted:
            store.cache.lift(KEY, tombstone)
        assert store.cache.fill(KEY, ticket, retained) is False
        assert isinstance(ask(store), Claimed)

    def test_nor_by_old_data_that_come_back(self, store, redis_client):
        dated = store.cache._link = DatedLink(store.cache._link)
        complete(store)
        assert isinstance(store.cache.look(KEY), Cached)
        ticket, retained = store.cache.ticket(KEY), store.truth.retained(KEY)
        names = list(redis_client.scan_iter(match=f"{store.cache.prefix}:*"))
        snapshot = {name: redis_client.get(name) for name in names}
        assert store.forget(KEY)
        redis_client.mset(snapshot)
        dated.history += 1
        assert isinstance(store.cache.look(KEY), Ticket)
        assert store.cache.fill(KEY, ticket, retained) is False
        assert isinstance(ask(store), Claimed)


class TestTrouble:
    @pytest.mark.parametrize("mode", ["away", "frozen", "deaf"])
    def test_without_an_answer_of_the_cache_the_truth_serves(
        self, store, truth, link, mode, patient
    ):
        complete(store)
        link.mode = mode
        with somebody_asks(truth, "claim"):
            assert isinstance(ask(store), Settled)
        assert store.forget is not None
        link.thaw()
        with nobody_asks(truth):
            assert isinstance(ask(store), Settled)

    def test_recovery_fills_the_cache_again(self, store, truth, link, patient):
        link.mode = "away"
        complete(store)
        link.mode = "well"
        with somebody_asks(truth, "claim", "retained"):
            assert isinstance(ask(store), Settled)
        with nobody_asks(truth):
            assert isinstance(ask(store), Settled)

    def test_a_flush_costs_one_question(self, store, truth, redis_client):
        complete(store)
        redis_client.delete(*redis_client.scan_iter(match=f"{store.cache.prefix}:*"))
        with somebody_asks(truth, "claim", "retained"):
            assert isinstance(ask(store), Settled)
        with nobody_asks(truth):
            assert isinstance(ask(store), Settled)

    def test_a_truth_that_fails_when_it_is_read_again_spoils_nothing(self, store, truth, link):
        def fail(identity):
            raise StoreUnavailable

        truth._truth.retained = fail
        complete(store)
        assert isinstance(ask(store), Settled)
        assert isinstance(store.cache.look(KEY), Ticket)

    def test_nothing_is_cached_of_a_transaction_that_may_be_undone(self, store, truth):
        record = ask(store, task_id="first").record
        truth._truth.joined = lambda: True
        assert store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=KEEP_MS)
        )
        assert isinstance(ask(store), Settled)
        assert isinstance(store.cache.look(KEY), Ticket)
        assert store.forget(KEY)
        # For as long as its tombstone stands, a commit makes no difference.
        assert store.cache.look(KEY) is None

    def test_a_server_that_takes_no_writes_still_answers_and_buries(
        self, store, truth, private_redis
    ):
        direct = redis.Redis.from_url(private_redis.url())
        full = HybridStore(RedisCache(private_redis.url(), options={"socket_timeout": 5}), truth)
        complete(full)
        direct.config_set("maxmemory", 1)
        try:
            with nobody_asks(truth):
                assert isinstance(ask(full), Settled)
            assert full.mark_delivered(KEY, token=full.get(KEY).token)
            assert not full.cache.breaker.open
            assert isinstance(ask(full), Settled)
            assert full.forget(KEY)
            complete(full)
        finally:
            direct.config_set("maxmemory", 0)
            full.close()
            direct.close()

    def test_a_dead_cache_costs_nothing_between_two_tries(self, store, link, monkeypatch):
        now = [100.0]
        store.cache.breaker = Breaker(lambda: now[0])
        link.mode = "away"
        tried = []
        exchange = BadLink.exchange
        monkeypatch.setattr(
            BadLink,
            "exchange",
            lambda self, commands: tried.append(now[0]) or exchange(self, commands),
        )
        for _ in range(1000):
            ask(store)
            now[0] += 0.1
        # Now, within a second, two, four … and every ten, after half of that at the earliest.
        gaps = [b - a for a, b in itertools.pairwise(tried)]
        assert len(gaps) >= 8
        for gap, longest in zip(gaps, [1, 2, 4, 8, *[10] * 1000], strict=False):
            assert longest / 2 <= round(gap, 1) <= longest + 0.1

    def test_of_many_one_tries_again(self):
        now = [0.0]
        breaker = Breaker(lambda: now[0])
        assert all(breaker.allows() for _ in range(3))
        breaker.failed()
        assert breaker.open
        assert not breaker.allows()
        now[0] = 1.1
        assert [breaker.allows() for _ in range(3)] == [True, False, False]
        breaker.succeeded()
        assert not breaker.open
        assert breaker.allows()

    def test_a_frozen_server_is_waited_for_only_briefly(self, private_redis, truth):
        store = HybridStore(RedisCache(private_redis.url()), truth)
        complete(store)
        private_redis.freeze()
        try:
            began = time.monotonic()
            for _ in range(200):
                assert isinstance(ask(store), Settled)
            assert time.monotonic() - began < 20
        finally:
            private_redis.thaw()
            store.close()

    def test_a_wrong_password_is_told_once_and_costs_only_speed(self, private_redis, truth, caplog):
        url = private_redis.url().replace("//", "//nobody:secret@", 1)
        store = HybridStore(RedisCache(url), truth)
        complete(store)
        for _ in range(3):
            assert isinstance(ask(store), Settled)
        (said,) = caplog.messages
        assert "going without the cache" in said
        assert "secret" not in said
        with pytest.raises(StoreMisconfigured):
            store.forget(KEY)
        store.close()


class TestOpening:
    @pytest.mark.parametrize(
        ("url", "where"),
        [
            ("hybrid+redis://h:7000/3?truth=memory://", "Redis at h:7000"),
            ("hybrid+rediss://:secret@h/3?truth=memory://", "Redis at h:6379"),
            ("hybrid+unix:///run/redis.sock?db=3&truth=memory://", "Redis at /run/redis.sock"),
            (
                "hybrid+sentinel://a;b:2/main/3?truth=memory://",
                "Redis master main of Sentinel at a;b:2",
            ),
            ("hybrid+redis+cluster://a:1,b?truth=memory://", "Redis Cluster at a:1,b"),
            ("hybrid+rediss+cluster://a:1?truth=memory%3A%2F%2F", "Redis Cluster at a:1"),
        ],
    )
    def test_a_hybrid_url_opens_a_cache_before_its_truth(self, url, where, open_store):
        store = open_store(url)
        assert isinstance(store, HybridStore)
        assert isinstance(store.truth, MemoryStore)
        assert where in repr(store)
        assert store.cache.prefix == "idem.cache"
        assert not store.supports_transactions

    def test_its_timeouts_are_short_unless_the_url_says_otherwise(self, open_store):
        def timeouts(url):
            pool = open_store(url).cache._link._pool
            connection = pool.connection_class(**pool.connection_kwargs)
            return connection.socket_timeout, connection.socket_connect_timeout

        assert timeouts("hybrid+redis://h?truth=memory://") == (0.25, 0.25)
        assert timeouts("hybrid+redis://h?truth=memory://&socket_timeout=2") == (2.0, 0.25)

    @pytest.mark.parametrize(
        "query",
        [
            "truth=",
            "truth=a&truth=b",
            "truth=hybrid%2Bredis://h",
            "truth=nothing://",
        ],
    )
    def test_a_truth_that_cannot_be_one_is_refused(self, open_store, query):
        with pytest.raises(InvalidOption):
            open_store(f"hybrid+redis://localhost?{query}")

    def test_a_store_that_does_not_say_for_how_long_it_keeps_a_record_is_no_truth(self, redis_url):
        with pytest.raises(InvalidOption, match="retained"):
            HybridStore(RedisCache(redis_url), ForwardingStore(MemoryStore()))

    @pytest.fixture
    def open_store(self) -> Callable[..., Any]:
        from celery_idempotent.stores import open_store

        return open_store
