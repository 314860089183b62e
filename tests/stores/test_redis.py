"""RedisStore keeps the contract on every kind of server."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_idempotent.records import Record, State
from celery_idempotent.stores.redis.store import RedisStore
from tests.contract import StoreContract
from tests.proof.model import KEY as CELL
from tests.stores.servers import Server
from tests.stores.shifted import FixedLink, Shift
from tests.stores.verbs import claim, in_one_bucket, settle

pytestmark = pytest.mark.redis


class RedisContract(StoreContract):
    @pytest.fixture
    def advance(self, store: RedisStore, nodes: list[redis.Redis]) -> Shift:
        return Shift(store, *nodes)

    @pytest.fixture
    def stop_at(self, store: RedisStore, nodes: list[redis.Redis]) -> Callable[[int], None]:
        if len(nodes) > 1:
            pytest.skip("the nodes of a cluster have no clock in common")
        link = FixedLink(store._link, nodes[0], f"{store.prefix}-clock")
        store._link = link  # type: ignore[assignment]
        link.set(time.time_ns() // 1000)
        return lambda ms: link.set(ms * 1000)

    def is_indexed(self, store: Any, record: Record | None) -> None:
        """Check the scores in all indexes, too."""
        super().is_indexed(store, record)
        name, *indexes = store._keys.of_record(CELL)
        scores = store._exchange(*((b"ZSCORE", index, name) for index in indexes))
        wanted: list[int | None] = [None, None, None]
        if record is not None and record.state is not State.COMPLETED:
            ended = {State.FAILED: 1, State.INTERRUPTED: 2}.get(record.state, 0)
            wanted[ended] = record.updated_ms if ended else record.deadline_ms
        assert [score and int(float(score)) for score in scores] == wanted

    def test_a_sweep_and_a_prune_of_one_full_bucket_go_to_the_end_of_their_limit(
        self, store, advance
    ):
        """A client that chooses its keys can put them all into one bucket."""
        for key in in_one_bucket(130):
            claim(store, key, keep_ms=60_000)
        advance(60_001)
        first = store.sweep(limit=120)
        assert (len(first.interrupted), first.more) == (120, True)
        second = store.sweep(limit=120)
        assert (len(second.interrupted), second.more) == (10, False)
        advance(120_001)
        pruned = store.prune(limit=120)
        assert pruned >= 120  # all that expired in one millisecond go together
        assert pruned + store.prune(limit=120) == 130


class TestRedis(RedisContract):
    @pytest.fixture
    def store(self, redis_store: RedisStore) -> RedisStore:
        return redis_store

    @pytest.fixture
    def nodes(self, redis_client: redis.Redis) -> list[redis.Redis]:
        return [redis_client]


class TestValkey(RedisContract):
    brief = few_cells = True

    @pytest.fixture
    def store(self, valkey: Server):
        store = RedisStore(valkey.url, prefix=uuid.uuid4().hex)
        yield store
        store.close()
        valkey.client.flushall()

    @pytest.fixture
    def nodes(self, valkey: Server) -> list[redis.Redis]:
        return [valkey.client]


class TestCluster(RedisContract):
    brief = few_cells = True

    @pytest.fixture
    def store(self, cluster_nodes: list[Server], cluster_url: str):
        store = RedisStore(cluster_url, prefix=uuid.uuid4().hex)
        yield store
        store.close()
        for node in cluster_nodes:
            node.client.flushall()

    @pytest.fixture
    def nodes(self, cluster_nodes: list[Server]) -> list[redis.Redis]:
        return [node.client for node in cluster_nodes]


def test_entries_of_records_kept_shortly_do_not_pile_up_behind_those_kept_for_long(redis_store):
    """Of one bucket the oldest entries, which a prune looks at first, are alive."""
    names = in_one_bucket(400)
    for each in names[:100]:
        settle(redis_store, claim(redis_store, each), State.FAILED)
    rest = iter(names[100:])
    for _ in range(20):
        for each in itertools.islice(rest, 15):
            settle(redis_store, claim(redis_store, each), State.FAILED, keep_ms=1)
        time.sleep(0.005)
        redis_store.prune(limit=10_000)
    assert redis_store.stats().failed < 200
