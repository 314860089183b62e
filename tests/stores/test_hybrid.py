"""A cache before a store keeps the contract; a settled key costs one trip, and a cache in trouble costs speed only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

pytest.importorskip("django")

from celery_idempotent.django import hybrid
from celery_idempotent.django.hybrid import Cache, HybridStore
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Claimed, Held, Mismatched, Settled, State, Stored
from celery_idempotent.stores import open_store
from celery_idempotent.testing import FakeClock
from tests.contract import StoreContract
from tests.stores import verbs
from tests.stores.hybrids import BadLink, MemoryHybrid
from tests.stores.shifted import Shift
from tests.stores.verbs import KEY, VALUE, settle

pytestmark = pytest.mark.redis

FINGERPRINT, OTHER = bytes(16), bytes(range(16))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cache(redis_url: str, prefix: str) -> Iterator[Cache]:
    cache = Cache(f"{redis_url}?prefix={prefix}&socket_timeout=5")
    yield cache
    cache.close()


@pytest.fixture
def store(cache: Cache, clock: FakeClock) -> Any:
    return MemoryHybrid(cache, clock)


@pytest.fixture
def link(cache: Any) -> Any:
    cache._link = BadLink(cache._link)
    return cache._link


@pytest.fixture
def entry(redis_client: redis.Redis, prefix: str) -> Callable[[], Any]:
    """Return the name of the only entry, ``None`` for none."""

    def name() -> Any:
        found = list(redis_client.scan_iter(match=f"{prefix}.cache:{{*}}:*"))
        assert len(found) <= 1
        return found[0] if found else None

    return name


class TestContract(StoreContract):
    """The clocks of store and cache are years apart."""

    brief = few_cells = True

    @pytest.fixture
    def store(self, cache: Cache, clock: FakeClock) -> Any:
        return MemoryHybrid(cache, clock)

    @pytest.fixture
    def advance(self, cache: Any, clock: FakeClock, redis_client: redis.Redis) -> Any:
        shift = Shift(cache, redis_client)

        def advance(ms: float) -> None:
            clock.advance(ms)
            shift(ms)

        return advance

    @pytest.fixture
    def stop_at(self, clock: FakeClock) -> Callable[[int], None]:
        return lambda ms: clock.advance(ms - clock() / 1000)


def ask(store: Any, **changes: Any) -> Any:
    return verbs.ask(store, **{"fingerprint": FINGERPRINT, "task_id": "another", **changes})


def complete(store: Any, state: Any = State.COMPLETED, **changes: Any) -> Any:
    record = verbs.claim(store, fingerprint=FINGERPRINT, task_id="first")
    assert settle(store, record, state, **changes)
    return record


@contextmanager
def looks(store: Any, count: int) -> Iterator[None]:
    before = store.asked
    yield
    assert store.asked - before == count


class TestAnswers:
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    @pytest.mark.parametrize("value", [None, VALUE])
    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_duplicate_of_a_settled_key_costs_one_round_trip_and_no_look(
        self, store, link, state, value, replaced
    ):
        complete(store, state, value=value, replaced=replaced)
        record = store.get(KEY)
        link.trips = 0
        with looks(store, 0):
            answer = ask(store)
        assert isinstance(answer, Settled)
        assert answer.record == record
        assert (answer.record.value, answer.record.replaced) == (value, replaced)
        assert link.trips == 1

    def test_a_publish_of_a_settled_key_is_answered_by_the_cache(self, store):
        complete(store)
        for fingerprint, count, kind in ((FINGERPRINT, 0, Settled), (OTHER, 1, Mismatched)):
            with looks(store, count):
                assert isinstance(verbs.reserve(store, fingerprint=fingerprint), kind)

    def test_its_age_goes_on_by_the_clock_of_the_cache(self, store, clock):
        complete(store)
        time.sleep(0.05)
        assert 40 <= ask(store).age_ms <= 20_000

    def test_the_store_answers_for_another_fingerprint_and_the_task_that_settled_the_key(
        self, store
    ):
        record = complete(store)
        with looks(store, 1):
            assert isinstance(ask(store, fingerprint=OTHER), Mismatched)
        assert store.mark_delivered(KEY, token=record.token)
        with looks(store, 1):
            assert ask(store, task_id="first").record.delivered is True

    def test_an_entry_ends_before_its_record(self, store, clock, redis_client, entry):
        record = complete(store, keep_ms=15_000)
        assert 0 < redis_client.pttl(entry()) <= 5_000
        redis_client.delete(entry())
        clock.advance(2_000)
        assert settle(store, record, value=None, keep_ms=1)
        assert 0 < redis_client.pttl(entry()) <= 3_000
        assert 2_000 <= ask(store).age_ms <= 4_000

    @pytest.mark.parametrize(
        "state", ["too short", "too large", "by an operator", "by a sweep", "not settled"]
    )
    def test_what_is_not_cached(self, store, entry, state):
        record = ask(store, task_id="first").record
        ending: Any = {"value": None}
        match state:
            case "too short":
                ending["keep_ms"] = hybrid._TICKET_MS
            case "too large":
                ending["value"] = Stored(
                    content_type="", content_encoding="", body=bytes(hybrid._MAX_BYTES)
                )
            case "by an operator":
                ending |= {"restore": False, "note": "fail by alice"}
            case "by a sweep":
                ending["swept"] = True
        if state == "not settled":
            store.fill(KEY)
        else:
            assert settle(store, record, State.FAILED, **ending)
        assert entry() is None

    @pytest.mark.parametrize("content", [b"", b"S", b"X" * 60, b"C" * 60, "a running claim"])
    def test_an_entry_that_is_none_is_not_believed(self, store, redis_client, entry, content):
        complete(store)
        name = entry()
        if isinstance(content, str):
            content = redis_client.get(name)
            content = content[:8] + b"P" + content[9:]
        redis_client.set(name, content, px=60_000)
        with looks(store, 1):
            assert isinstance(ask(store), Settled)


class TestForget:
    @pytest.mark.parametrize("mode", ["away", "frozen", "deaf"])
    @pytest.mark.parametrize("exactly", [False, True])
    def test_nothing_is_deleted_if_the_cache_does_not_take_the_tombstone(
        self, store, link, mode, exactly
    ):
        complete(store)
        record = store.get(KEY)
        only = {"token": record.token, "state": record.state} if exactly else {}
        link.mode = mode
        for _ in range(2):  # also while others go without the cache
            with pytest.raises(StoreUnavailable, match="nothing was changed"):
                store.forget(KEY, **only)
        assert store.get(KEY) == record
        link.thaw()
        assert store.forget(KEY, **only) is True
        assert isinstance(ask(store), Claimed)

    def test_for_an_hour_the_store_answers_for_what_was_forgotten(self, store, redis_client, entry):
        complete(store)
        assert store.forget(KEY)
        assert hybrid._TOMBSTONE_MS - 5_000 < redis_client.pttl(entry()) <= hybrid._TOMBSTONE_MS
        complete(store)
        with looks(store, 1):
            assert isinstance(ask(store), Settled)

    def test_what_failed_and_is_completed_leaves_no_copy_of_the_failure(self, store, link):
        complete(store, State.FAILED)
        with looks(store, 0):
            assert ask(store).record.state is State.FAILED
        seen = store.get(KEY)
        link.mode = "away"
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            settle(store, seen, restore=False)
        assert store.get(KEY) == seen
        link.mode = "well"
        assert settle(store, seen, restore=False)
        assert ask(store).record.state is State.COMPLETED

    def test_a_copy_made_while_the_record_was_deleted_goes_with_it(
        self, store, redis_client, entry
    ):
        complete(store)
        forget = store._at

        def flushed_and_filled(identity, verb):
            store._at = forget
            redis_client.delete(entry())
            store.fill(KEY)
            assert store.cache.look(KEY) is not None
            return forget(identity, verb)

        store._at = flushed_and_filled
        assert store.forget(KEY)
        assert isinstance(ask(store), Claimed)

    @pytest.mark.parametrize("mode", ["well", "away"])
    def test_where_each_call_runs_no_copy_of_an_end_answers(self, store, link, mode):
        complete(store)
        link.mode = mode
        assert isinstance(ask(store, task_id="another", each_runs=True), Claimed)
        link.mode, store.cache.away_until = "well", 0.0
        assert isinstance(ask(store, task_id="a third", each_runs=True), Held)

    @pytest.mark.parametrize("loss", ["nothing", "the tombstone and the ticket", "the ticket"])
    def test_a_fill_that_comes_after_a_forget_is_refused(
        self, store, cache, redis_client, entry, loss
    ):
        complete(store)
        redis_client.delete(entry())
        ticket, look = cache.ticket(KEY), store._at(KEY, lambda look: look)
        assert store.forget(KEY)
        if loss == "the ticket":
            redis_client.delete(ticket)
        elif loss != "nothing":
            redis_client.delete(entry(), ticket)
        cache.fill(KEY, ticket, look)
        assert cache.look(KEY) is None
        assert isinstance(ask(store), Claimed)

    def test_a_ticket_ends(self, cache, redis_client):
        assert 0 < redis_client.pttl(cache.ticket(KEY)) <= hybrid._TICKET_MS


class TestTrouble:
    @pytest.mark.parametrize("mode", ["away", "frozen", "deaf"])
    def test_without_an_answer_of_the_cache_the_store_serves(self, store, link, mode):
        complete(store)
        link.mode = mode
        with looks(store, 1):
            assert isinstance(ask(store), Settled)
        assert store.cache.away_until
        link.thaw()
        store.cache.away_until = 0.0
        with looks(store, 0):
            assert isinstance(ask(store), Settled)

    def test_a_flush_costs_a_look_for_each_duplicate(self, store, redis_client, entry):
        complete(store)
        redis_client.delete(entry())
        for _ in range(2):
            with looks(store, 1):
                assert isinstance(ask(store), Settled)

    def test_old_data_that_come_back_answer_again_and_run_nothing(self, store, redis_client, entry):
        complete(store)
        name, old = entry(), redis_client.get(entry())
        assert store.forget(KEY)
        redis_client.set(name, old, px=120_000)
        assert isinstance(ask(store), Settled)
        assert store.forget(KEY) is False
        assert isinstance(ask(store), Claimed)

    def test_a_store_that_fails_when_it_is_read_again_spoils_nothing(self, store, entry):
        record, at = ask(store, task_id="first").record, store._at

        def settle_and_fail(identity, verb):
            def fail(*_):
                raise StoreUnavailable

            store._at = fail
            return at(identity, verb)

        store._at = settle_and_fail
        assert settle(store, record, value=None)
        assert entry() is None

    def test_a_dead_cache_costs_nothing_between_two_tries(self, store, link, monkeypatch, caplog):
        now = [100.0]
        monkeypatch.setattr(hybrid.time, "monotonic", lambda: now[0])
        link.mode = "away"
        tried = []
        for _ in range(200):
            before = link.trips
            ask(store)
            if link.trips > before:
                tried.append(now[0])
            now[0] += 0.25
        assert tried == [100.0 + hybrid._PAUSE * n for n in range(len(tried))]
        assert len(tried) == 10
        link.mode = "well"
        ask(store)
        (away,) = [each for each in caplog.messages if "the cache is not used for now" in each]
        assert "Connection refused" in away

    def test_a_wrong_password_is_told_once_and_costs_only_speed(self, private_redis, clock, caplog):
        url = private_redis.url().replace("//", "//nobody:secret@", 1)
        store = MemoryHybrid(Cache(url), clock)
        complete(store)
        for _ in range(3):
            assert isinstance(ask(store), Settled)
        (said,) = caplog.messages
        assert "the cache is not used for now" in said
        assert "secret" not in said
        with pytest.raises(StoreMisconfigured):
            store.forget(KEY)
        store.close()


def test_in_a_cluster_a_ticket_lies_beside_its_entry(cluster_url, clock):
    store = MemoryHybrid(Cache(cluster_url, {"socket_timeout": 5}), clock)
    complete(store)
    with looks(store, 0):
        assert isinstance(ask(store), Settled)
    assert store.forget(KEY)
    assert isinstance(ask(store), Claimed)
    store.close()


class TestOpening:
    @pytest.mark.parametrize(
        ("url", "where"),
        [
            ("hybrid+redis://h:7000/3", "Redis at h:7000"),
            ("hybrid+unix:///run/redis.sock?db=3", "Redis at /run/redis.sock"),
            ("hybrid+redis+cluster://a:1,b", "Redis Cluster at a:1,b"),
        ],
    )
    def test_a_hybrid_url_opens_a_cache_before_a_database(self, url, where, use_alias):
        store: Any = open_store(f"{url}{'&' if '?' in url else '?'}truth={use_alias}")
        assert isinstance(store, HybridStore)
        assert (store.alias, store.cache.prefix) == (use_alias, "idem.cache")
        assert where in store.cache._link.where

    def test_its_timeouts_are_short_unless_the_url_says_otherwise(self, use_alias):
        def timeouts(url):
            pool = open_store(url).cache._link.pool
            connection = pool.connection_class(**pool.connection_kwargs)
            return connection.socket_timeout, connection.socket_connect_timeout

        assert timeouts(f"hybrid+redis://h?truth={use_alias}") == (0.25, 0.25)
        assert timeouts(f"hybrid+redis://h?truth={use_alias}&socket_timeout=2") == (2.0, 0.25)

    @pytest.mark.parametrize("query", ["truth=", "truth=a&truth=b", "truth=memory%3A%2F%2F"])
    def test_a_truth_that_cannot_be_one_is_refused(self, query):
        with pytest.raises(InvalidOption, match="one alias"):
            open_store(f"hybrid+redis://localhost?{query}")

    @pytest.fixture
    def use_alias(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Let any alias be one: nothing connects."""
        only_alias = lambda self, alias: setattr(self, "alias", alias)  # noqa: E731
        monkeypatch.setattr(DjangoStore, "__init__", only_alias)
        return "shop"


def test_a_failed_call_that_runs_again_is_answered_by_its_new_end(store):
    complete(store, State.FAILED, message=b"message")
    assert isinstance(ask(store), Settled)
    assert store.requeue(KEY, deadline_ms=60_000, note="requeue by alice")
    assert isinstance(verbs.reserve(store, fingerprint=FINGERPRINT), Held), "its message waits"
    again = verbs.claim(store, fingerprint=FINGERPRINT, task_id="first")
    assert isinstance(ask(store), Held)
    assert settle(store, again)
    assert ask(store).record.state is State.COMPLETED
