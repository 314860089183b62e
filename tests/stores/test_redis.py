"""RedisStore keeps the contract on every kind of server."""

from __future__ import annotations

import uuid

import pytest
import redis

from celery_idempotent.stores.redis.store import RedisStore
from celery_idempotent.testing import StoreContract
from tests.stores.doubling import doubles_ten_times
from tests.stores.servers import Server
from tests.stores.shifted import Shift

pytestmark = pytest.mark.redis


class RedisContract(StoreContract):
    @pytest.fixture
    def advance(self, store: RedisStore, nodes: list[redis.Redis]) -> Shift:
        return Shift(store, *nodes)


class TestRedis(RedisContract):
    @pytest.fixture
    def store(self, redis_store: RedisStore) -> RedisStore:
        return redis_store

    @pytest.fixture
    def nodes(self, redis_client: redis.Redis) -> list[redis.Redis]:
        return [redis_client]

    def test_a_deadline_doubles_ten_times_at_the_most(self, store, advance):
        doubles_ten_times(store, advance)


class TestValkey(RedisContract):
    brief = True

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
    brief = True

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
