"""Lists in Redis: only our records, in bounded steps, wherever a page ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from celery_idempotent.records import Identity, Selection, State, Stored
from celery_idempotent.stores.base import HOUR, MINUTE
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.shifted import CountingLink, LinkProxy
from tests.stores.verbs import claim, in_one_bucket, settle
from tests.support.waiting import wait_for

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
