"""Fixtures for stores: servers of other kinds, each started once a session."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import pytest

from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.servers import Server, cluster, redis_binary, running, valkey_binary


@pytest.fixture
def redis_store(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    """A store in the shared Redis."""
    store = RedisStore(redis_url, prefix=prefix)
    yield store
    store.close()


@pytest.fixture(scope="session")
def servers_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def valkey(servers_directory: pathlib.Path) -> Iterator[Server]:
    """A Valkey of our own."""
    with running(valkey_binary(), servers_directory) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_nodes(servers_directory: pathlib.Path) -> Iterator[list[Server]]:
    """The three masters of a Redis Cluster of our own."""
    with cluster(redis_binary(), servers_directory) as nodes:
        yield nodes


@pytest.fixture
def cluster_url(cluster_nodes: list[Server]) -> str:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster_nodes)
    return f"redis+cluster://{hosts}"


@pytest.fixture(scope="session")
def server(servers_directory: pathlib.Path) -> Iterator[Server]:
    """A Redis of our own, whose user ``u`` has the rights that a test gives."""
    with running(redis_binary(), servers_directory) as server:
        yield server


@pytest.fixture
def store_with(server: Server) -> Iterator[Callable[..., RedisStore]]:
    """A function that gives a store whose user has these rules, and no other."""
    with contextlib.ExitStack() as stack:

        def store_with(*rules: str) -> RedisStore:
            server.client.execute_command("ACL", "SETUSER", "u", "reset", "on", ">pw", *rules)
            store = RedisStore(f"redis://u:pw@127.0.0.1:{server.port}/0")
            stack.callback(store.close)
            return store

        yield store_with
    server.client.flushall()
