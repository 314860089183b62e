"""What RedisStore leaves in Redis and lists: exact indexes, no key without an end, only our records, in steps."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import time
from typing import Any

import pytest
import redis

from celery_idempotent.celery.checks import check_store
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Held, Identity, ReserveRequest, Selection, State, Stored
from celery_idempotent.stores.base import HOUR, MINUTE
from celery_idempotent.stores.redis.format import LAYOUT, MARK
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.shifted import CountingLink, LinkProxy, Shift
from tests.stores.verbs import (
    KEEP_MS,
    KEY,
    LEASE_MS,
    ask,
    claim,
    in_one_bucket,
    renew,
    reserve,
    settle,
)
from tests.support.admin import make_app
from tests.support.threads import all_at_once
from tests.support.waiting import wait_for

pytestmark = pytest.mark.redis

#: Its second byte were flags: a claim with a fingerprint could be taken for a record of version 1.
FIRST_LAYOUT = b"P\1" + bytes(81) + b"\n"


@pytest.fixture
def advance(redis_store: RedisStore, redis_client: redis.Redis) -> Shift:
    return Shift(redis_store, redis_client)


@pytest.fixture
def names(redis_store: RedisStore):
    return redis_store._keys.of_record(KEY)


def indexes(client: Any, names) -> tuple[dict[bytes, float], dict[bytes, float]]:
    return (
        dict(client.zrange(names[1], 0, -1, withscores=True)[:-1]),  # without the largest token
        dict(client.zrange(names[2], 0, -1, withscores=True)),
    )


@pytest.mark.parametrize(("later_ms", "moved_ms"), [(0, 0), (900, 900), (1_000, 0)])
def test_a_settle_counts_from_the_last_claim_for_a_second_and_then_asks_for_the_time(
    redis_store, monkeypatch, later_ms, moved_ms
):
    record, now_ns = claim(redis_store), time.monotonic_ns()
    later_ns = now_ns + later_ms * 1_000_000
    monkeypatch.setattr("celery_idempotent.stores.redis.store.monotonic_ns", lambda: later_ns)
    settle(redis_store, record)
    passed = redis_store.get(KEY).updated_ms - record.updated_ms
    assert moved_ms <= passed < moved_ms + 500


def test_a_prune_that_another_one_forestalled_leaves_what_is_kept(redis_store, redis_client, names):
    """Between its look and its write another prune drops what both have seen, and the key fails again."""
    redis_client.zadd(names[2], {names[0]: 1, "gone": 1})
    exchange = redis_store._link.exchange

    def forestalled(commands, node):
        if any(each[0] == b"EVALSHA" for each in commands):
            assert redis_client.zrem(names[2], "gone") == 1
            redis_store._link.exchange = exchange
            settle(redis_store, claim(redis_store), State.FAILED)
        return exchange(commands, node)

    redis_store._link.exchange = forestalled
    assert redis_store.prune(limit=10) == 0
    assert redis_client.zrange(names[2], 0, -1) == [names[0]]


def test_sweeps_with_a_limit_begin_anywhere(redis_store):
    """The others would wait for as long as there is something before them."""
    keys, first = [Identity(namespace="charge", key=f"{n}") for n in range(5)], set()
    for _ in range(100):
        for identity in keys:
            redis_store.forget(identity)
            claim(redis_store, identity, lease_ms=1)
        wait_for(lambda: redis_store.stats().stale == len(keys), what="the end of all leases")
        (swept,) = redis_store.sweep(limit=1).interrupted
        first.add(swept.identity)
        if len(first) > 1:
            break
    assert len(first) > 1


def test_a_failed_record_that_is_claimed_anew_counts_no_more(redis_store, advance):
    settle(redis_store, claim(redis_store), State.FAILED)
    advance(KEEP_MS + 1)
    claim(redis_store)
    assert redis_store.list(Selection(states=frozenset({State.FAILED}))).records == ()
    assert redis_store.prune(limit=10) == 1
    assert (redis_store.stats().live, redis_store.stats().failed) == (1, 0)


def test_a_prune_comes_to_what_is_behind_records_that_are_kept_for_longer(
    redis_store, redis_client
):
    index = redis_store._keys.index(b"!failures")[17]
    for identity in (kept := in_one_bucket(40)):
        settle(redis_store, claim(redis_store, identity), State.FAILED)
    redis_client.zadd(index, {f"gone {n}": 1e13 + n for n in range(40)})
    for _ in range(2000):  # the chance of missing one is below 1e-20
        redis_store.prune(limit=1000)
        if redis_client.zcard(index) == len(kept):
            break
    assert redis_store.stats().failed == len(kept)


@pytest.mark.parametrize("state", ["expired", "PROCESSING", "COMPLETED", "FAILED"])
def test_a_sweep_mends_the_entry_of_a_record_in_the_index_of_leases(
    redis_store, redis_client, names, advance, state
):
    record = claim(redis_store)
    if state == "expired":
        advance(LEASE_MS + KEEP_MS + 1)
    elif state != "PROCESSING":
        settle(redis_store, record, State[state])
    found = redis_store.get(KEY)
    redis_client.zadd(names[1], {names[0]: 1})
    assert redis_store.sweep(limit=10).interrupted == ()
    entry = record.deadline_ms if state == "PROCESSING" else None
    assert redis_client.zscore(names[1], names[0]) == entry
    assert redis_store.get(KEY) == found


def test_a_run_that_went_on_after_a_sweep_settles_with_the_crash_that_was_counted(
    redis_store, advance
):
    """Its own record has none."""
    record = claim(redis_store)
    advance(LEASE_MS + 1)
    assert redis_store.sweep(limit=10).interrupted
    assert renew(redis_store, record) == [True]
    assert settle(redis_store, record)
    assert redis_store.get(KEY).crashes == 1


@pytest.mark.parametrize(
    "last", ["given back", "reserved", "taken over", "of another key", "flushed"]
)
def test_a_clock_that_was_set_back_makes_no_smaller_token(redis_store, redis_client, advance, last):
    one, other = in_one_bucket(2)
    if last in ("taken over", "of another key"):
        assert redis_store.interrupt(one, token=claim(redis_store, one).token)
    advance(5_000)
    take = (lambda *key: reserve(*key).record) if last == "reserved" else claim
    newest = take(redis_store, other if last == "of another key" else one)
    if last == "flushed":  # the mark of the bucket: the record makes it good
        assert redis_store.interrupt(one, token=newest.token)
        redis_client.zrem(redis_store._keys.of_record(one)[1], MARK)
    elif last != "of another key":
        assert redis_store.release(one, token=newest.token)
    advance._link.offset_us = 0
    assert claim(redis_store, one).token == newest.token + 1


def test_only_the_high_water_mark_of_a_bucket_stays_for_ever(
    redis_store, redis_client, names, prefix, advance
):
    for n in range(5):
        claim(redis_store, Identity(namespace="charge", key=f"{n}"))
        settle(redis_store, claim(redis_store, Identity(namespace="charge", key=f"c{n}")))
    for name in redis_client.scan_iter(match=f"{prefix}*"):
        assert redis_client.pttl(name) > 0 or name.endswith(b"!leases")
    advance(LEASE_MS + KEEP_MS + 1)
    redis_store.sweep(limit=100)
    for name in redis_client.scan_iter(match=f"{prefix}*"):
        assert redis_client.zrange(name, 0, -1) == [MARK]


@pytest.mark.parametrize(
    "where", ["redis_url", pytest.param("cluster_url", marks=pytest.mark.wide)]
)
def test_no_verb_begins_beside_records_that_it_would_not_find(prefix, request, where):
    """Their operations would run again without a word."""
    url = request.getfixturevalue(where)
    with contextlib.ExitStack() as stack:
        store, refused = (
            stack.enter_context(contextlib.closing(RedisStore(url, prefix=prefix))) for _ in "12"
        )
        claim(store)
        name, which = f"{prefix}:{{0}}!layout".encode(), "layout 1"
        store._exchange((b"SET", name, b"1"))
        assert isinstance(ask(store), Held)  # a process that has begun goes on
        for verb in (lambda: ask(refused), refused.now_ms, lambda: refused.get(KEY)):
            with pytest.raises(StoreMisconfigured, match=f"{which} under the prefix"):
                verb()
        (finding,) = check_store(make_app(refused))
        assert (finding.id, which in finding.problem) == ("E006", True)
        store._exchange((b"DEL", name))
        assert isinstance(ask(refused), Held)


def test_the_layout_is_noted_with_the_counters_and_by_no_look(redis_store, redis_client, prefix):
    """Also after a flush, and by two workers at once."""
    name = f"{prefix}:{{0}}!layout"
    check_store(make_app(redis_store))
    assert not redis_client.exists(name)
    for _ in range(2):
        all_at_once(8, lambda _: redis_store.count({("charge", "settled"): 1}))
        assert (redis_client.get(name), redis_client.ttl(name)) == (LAYOUT, -1)
        redis_client.delete(name)
    redis_client.set(name, "1", ex=60)
    redis_store.count({("charge", "settled"): 1})
    assert redis_client.get(name) == b"1"


@pytest.mark.parametrize(
    "foreign", [b"S" + bytes(82) + b"\n", b"P\2" + bytes(81) + b"\n", b"X", FIRST_LAYOUT]
)
def test_a_record_of_a_newer_version_is_left_alone(
    redis_store, redis_client, names, foreign, caplog
):
    record = claim(redis_store)
    redis_client.set(names[0], foreign, px=KEEP_MS)
    message = ReserveRequest(identity=KEY, task_id="id", deadline_ms=1000, keep_ms=KEEP_MS)
    for verb in (
        lambda: redis_store.get(KEY),
        lambda: claim(redis_store),
        lambda: redis_store.reserve(message),
        lambda: redis_store.requeue(KEY, deadline_ms=1000),
        lambda: renew(redis_store, record),
        lambda: settle(redis_store, record),
        lambda: redis_store.release(KEY, token=record.token),
        lambda: redis_store.forget(KEY),
    ):
        with pytest.raises(
            StoreMisconfigured, match=f"{re.escape(names[0].decode())}.*newer version"
        ):
            verb()
    redis_client.zadd(names[1], {names[0]: 1})
    other = claim(redis_store, dataclasses.replace(KEY, key="other")).identity
    for selection in Selection(), Selection(states=frozenset({State.PROCESSING})):
        caplog.clear()
        assert [each.identity for each in redis_store.list(selection).records] == [other]
        assert names[0].decode() in caplog.text
    report = redis_store.sweep(limit=10)
    assert (report.interrupted, report.requeued) == ((), ())
    assert redis_client.get(names[0]) == foreign
    assert [redis_store.discard(KEY) for _ in range(2)] == [True, False]
    assert (redis_client.exists(names[0]), indexes(redis_client, names)) == (0, ({}, {}))


def test_a_key_of_somebody_else_is_a_misconfiguration(redis_store, redis_client, names):
    redis_client.hset(names[0], "a", "b")
    with pytest.raises(StoreMisconfigured, match="WRONGTYPE"):
        redis_store.get(KEY)
    with pytest.raises(StoreMisconfigured, match="WRONGTYPE"):
        claim(redis_store)


def test_a_sweep_of_a_thousand_takes_a_handful_of_round_trips(redis_store):
    for n in range(1000):
        claim(redis_store, Identity(namespace="charge", key=f"{n}"), lease_ms=1)
    time.sleep(0.01)
    link = redis_store._link = CountingLink(redis_store._link)
    report = redis_store.sweep(limit=2000)
    # The indexes, then 250 records at a time, which are read and written; each once more for the scripts that the
    # server did not know.
    assert link.trips <= 2 * (1 + 2 * 4)
    assert len(report.interrupted) == 1000


def test_a_store_that_lost_its_data_says_so_in_every_process(
    redis_store: RedisStore, redis_url: str, prefix: str, redis_client: redis.Redis, caplog: Any
) -> None:
    assert [redis_store.health().mark < 0 for _ in range(2)] == [True, True]
    began = -redis_store.health().mark
    for name in redis_client.scan_iter(f"{prefix}:*"):
        redis_client.delete(name)
    time.sleep(0.002)
    others = [RedisStore(redis_url, prefix=prefix) for _ in range(2)]
    assert others[0].health().mark < -began, "it does not know what there was"
    assert redis_store.health().mark > began
    assert others[1].health().mark == others[0].health().mark == redis_store.health().mark
    assert [each.getMessage() for each in caplog.records if "lost its data" in each.msg]
    for each in others:
        each.close()


pytestmark = pytest.mark.redis

COMPLETED = Selection(states=frozenset({State.COMPLETED}))
PROCESSING = Selection(states=frozenset({State.PROCESSING}))


def pages(store: RedisStore, selection: Selection, **how: Any) -> list[list[str]]:
    """Return the keys of a whole list, page by page."""
    cursor, found = "", list[list[str]]()
    while cursor or not found:
        page = store.list(selection, cursor=cursor, **how)
        found.append([record.identity.key for record in page.records])
        cursor = page.cursor
        assert len(found) < 1000
    return found


def all_keys(store: RedisStore, selection: Selection, **how: Any) -> list[str]:
    return [key for page in pages(store, selection, **how) for key in page]


class AnyOrder(LinkProxy):
    """Gives the keys of a step of a scan in another order each time, as a server does that resizes its table."""

    random = random.Random(1)

    def exchange(self, commands: Any, node: Any = None) -> list[Any]:
        answers: list[Any] = self._link.exchange(commands, node)
        for command, answer in zip(commands, answers, strict=True):
            if command[0] == b"SCAN":
                self.random.shuffle(answer[1])
        return answers


@pytest.mark.parametrize("limit", [1, 7])
def test_nor_when_a_step_gives_its_keys_in_another_order_the_next_time(private_redis, limit):
    store = RedisStore(private_redis.url())
    wanted = [f"{n}" for n in range(100)]
    try:
        for key in wanted:
            settle(store, claim(store, Identity(namespace="charge", key=key)))
        store._link = AnyOrder(store._link)  # type: ignore[assignment]
        found = pages(store, COMPLETED, limit=limit)
        assert sorted(key for page in found for key in page) == sorted(wanted)
        assert max(map(len, found)) < limit + 10  # no step is smaller than one chain of the table
    finally:
        store.close()


def test_other_keys_of_the_server_are_not_ours(redis_url, prefix, redis_client: redis.Redis):
    ours, theirs = (RedisStore(redis_url, prefix=f"{prefix}{end}") for end in ("[a]*", "a"))
    try:
        settle(ours, claim(ours, Identity(namespace="charge", key="{ours}:x")))
        settle(theirs, claim(theirs, Identity(namespace="charge", key="theirs")))
        redis_client.set(f"{prefix}[a]*:notes", "no record", ex=60)
        assert all_keys(ours, Selection()) == ["{ours}:x"]
        assert all_keys(theirs, Selection()) == ["theirs"]
    finally:
        ours.close()
        theirs.close()


def test_a_stale_record_is_found_beside_more_live_ones_than_a_page_looks_at(redis_store):
    """From the latest deadline down it would come last, and the alert on stale claims would stay silent."""
    stale = [Identity(namespace="charge", key=f"stale {n}") for n in range(3)]
    for identity in stale:
        claim(redis_store, identity, lease_ms=1)
    for n in range(600):
        claim(redis_store, Identity(namespace="charge", key=f"{n}"))
    wait_for(lambda: redis_store.stats().stale == 3, what="the end of the leases")
    page = redis_store.list(Selection(stale=True), limit=500, look_at=500)
    assert sorted(each.identity.key for each in page.records) == [each.key for each in stale]
    assert (page.looked_at, page.cursor) == (3, "")
    found = all_keys(redis_store, Selection(stale=True), limit=1)
    assert sorted(found) == [each.key for each in stale]


def test_a_large_result_does_not_travel(redis_store):
    stored = Stored(content_type="text/plain", content_encoding="utf-8", body=b"x" * 1_000_000)
    settle(redis_store, claim(redis_store, Identity(namespace="charge", key="large")), value=stored)
    read = []
    exchange = redis_store._link.exchange

    def weigh(commands, node):
        answers = exchange(commands, node)
        read.extend(len(a) for a in answers if isinstance(a, bytes))
        return answers

    redis_store._link.exchange = weigh
    assert all_keys(redis_store, COMPLETED) == ["large"]
    assert 0 < max(read) <= 5000


INTERRUPTED = Selection(states=frozenset({State.INTERRUPTED}))


def interrupt(store: RedisStore, identity: Identity) -> None:
    assert store.interrupt(identity, token=claim(store, identity).token)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_the_newest_come_first_also_where_they_share_a_bucket_and_a_millisecond(
    redis_store, redis_client, limit
):
    wanted = in_one_bucket(20)
    for identity in wanted:
        interrupt(redis_store, identity)
    index = redis_store._keys.index(b"!interrupted")[17]
    end = redis_client.zscore(index, redis_store._keys.of_record(wanted[-1])[0])
    for identity in wanted[10:]:
        redis_client.zadd(index, {redis_store._keys.of_record(identity)[0]: end})
    found = all_keys(redis_store, INTERRUPTED, limit=limit)
    assert set(found[:10]) == {each.key for each in wanted[10:]}
    assert sorted(found[10:]) == sorted(each.key for each in wanted[:10])


def test_a_cursor_is_of_its_own_kind_of_list(redis_store):
    for key in ("a", "b"):
        interrupt(redis_store, Identity(namespace="charge", key=key))
    cursor = redis_store.list(INTERRUPTED, limit=1).cursor
    assert len(redis_store.list(INTERRUPTED, limit=1, cursor=cursor).records) == 1
    for selection in (PROCESSING, COMPLETED):
        with pytest.raises(ValueError, match="another list"):
            redis_store.list(selection, cursor=cursor)


def test_counters_are_kept_for_as_long_as_they_are_asked_for(redis_store, redis_client):
    redis_store.count({("charge", "settled"): 1})
    for period, asked in ((HOUR, {"hours": 2}), (MINUTE, {"minutes": 2})):
        (counted,) = redis_store.counts(**asked)
        left_s = redis_client.ttl(redis_store._keys.counts(period.ms, counted.start_ms))
        assert (period.kept - 1) * period.ms < left_s * 1000 <= period.kept * period.ms


def test_those_of_one_task_among_many_are_found_in_few_round_trips(redis_store):
    for n in range(600):
        namespace = "charge" if n % 100 == 0 else "other"
        interrupt(redis_store, Identity(namespace=namespace, key=f"{n:03}"))
    link = redis_store._link = CountingLink(redis_store._link)
    selection = Selection(states=frozenset({State.INTERRUPTED}), namespace="charge")
    page = redis_store.list(selection, limit=50)
    wanted = [f"{n}00" for n in range(5, -1, -1)]
    assert [record.identity.key for record in page.records] == wanted
    assert (page.cursor, page.looked_at) == ("", 600)
    assert link.trips <= 10
