"""RedisStore waits for replicas: what they do not have in time is not claimed and not settled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Mismatched,
    ReserveRequest,
    Retained,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.hybrid.cache import Cached, RedisCache
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.servers import Server, redis_binary, running, valkey_binary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.redis

KEY = Identity(namespace="charge", key="order-17")
OTHER = Identity(namespace="charge", key="order-18")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
LEASE_MS = 60_000
KEEP_MS = 120_000
PATIENCE_MS = 600


class Pair:
    """A master, its replica, and stores that wait for it."""

    def __init__(self, master: Server, replica: Server) -> None:
        self.master, self.replica = master, replica
        #: For what the replica is to have, and for what it cannot have.
        self.store: Any = RedisStore(master.url, replicas=1, replica_timeout_ms=20_000)
        self.hasty: Any = RedisStore(master.url, replicas=1, replica_timeout_ms=PATIENCE_MS)
        self.plain: Any = RedisStore(master.url)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the replica: its connection stays, and the master does not notice yet."""
        os.kill(self.replica.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.replica.process.pid, signal.SIGCONT)

    def in_step(self) -> bool:
        """Has the replica all that the master has?"""
        return bool(self.master.client.wait(1, 100) == 1)

    def replicated(self, identity: Identity = KEY) -> bytes:
        """Return what the replica has, without waiting for it."""
        found = self.replica.client.get(self.store._keys.locate(identity)[1])
        assert isinstance(found, bytes)
        return found


@pytest.fixture(scope="module", params=[redis_binary, valkey_binary], ids=["redis", "valkey"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    directory: Path = tmp_path_factory.mktemp("replicas")
    binary = request.param()
    with (
        running(binary, directory) as master,
        running(binary, directory, "--replicaof", "127.0.0.1", master.port) as replica,
    ):
        yield master, replica


@pytest.fixture
def pair(servers: tuple[Server, Server]) -> Iterator[Pair]:
    pair = Pair(*servers)
    pair.master.client.flushall()
    wait_for(
        lambda: (
            pair.replica.client.info("replication")["master_link_status"] == "up" and pair.in_step()
        ),
        20,
        "the replica",
    )
    yield pair
    pair.store.close()
    pair.hasty.close()
    pair.plain.close()


def ask(store, identity=KEY, **changes):
    asked = {"attempt": os.urandom(8), "lease_ms": LEASE_MS, "keep_ms": KEEP_MS}
    return store.claim(ClaimRequest(identity=identity, **{**asked, **changes}))


def claim(store, identity=KEY, **changes):
    answer = ask(store, identity, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def complete(store, record, value=VALUE):
    return store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=value, keep_ms=KEEP_MS)
    )


def too_few():
    return pytest.raises(StoreUnavailable, match=r"fewer than 1 replicas .* within 600 ms")


def test_what_was_answered_is_on_the_replica(pair):
    for n in range(50):
        identity = Identity(namespace="charge", key=f"{n}")
        record = claim(pair.store, identity)
        assert pair.replicated(identity)[:1] == b"P"
        assert complete(pair.store, record)
        assert pair.replicated(identity)[:1] == b"C"


def test_a_replica_does_not_answer_for_a_cache(pair):
    """It may have been cut off from its master, and know nothing of what was forgotten since."""
    caches = [RedisCache(server.url) for server in (pair.master, pair.replica)]
    record = claim(pair.plain)
    assert complete(pair.plain, record)
    retained = Retained(pair.plain.get(KEY), age_ms=0, left_ms=KEEP_MS)
    assert caches[0].fill(KEY, caches[0].ticket(KEY), retained)
    wait_for(pair.in_step, 20, "the replica")
    assert isinstance(caches[0].look(KEY), Cached)
    assert caches[1].look(KEY) is None
    for cache in caches:
        cache.close()


def test_a_claim_that_the_replica_lacks_is_undone(pair):
    mine = os.urandom(8)
    with pair.frozen():
        started = time.monotonic()
        with too_few():
            claim(pair.hasty, attempt=mine)
        assert time.monotonic() - started < 5
        assert pair.plain.get(KEY) is None
    wait_for(pair.in_step)
    assert claim(pair.store, attempt=mine).attempts == 1


def test_an_undone_claim_keeps_reservation_crashes_and_steps(pair):
    pair.plain.reserve(
        ReserveRequest(identity=KEY, task_id="first", deadline_ms=1, keep_ms=KEEP_MS)
    )
    crashed = claim(pair.plain, OTHER, lease_ms=1)
    assert pair.plain.checkpoint(OTHER, token=crashed.token, name="pay", value=VALUE)
    again = claim(pair.plain, Identity(namespace="charge", key="3"), lease_ms=1)
    time.sleep(0.005)
    with pair.frozen():
        for identity in (KEY, OTHER, again.identity):
            with too_few():
                claim(pair.hasty, identity, task_id="first")
    reserved, stepped, stale = (pair.plain.get(i) for i in (KEY, OTHER, again.identity))
    assert (reserved.state, reserved.task_id, reserved.reserved) == (State.QUEUED, "first", True)
    assert (stepped.state, stepped.crashes) == (State.INTERRUPTED, 1)
    assert stepped.steps == (("pay", VALUE),)
    assert (stale.state, stale.crashes) == (State.INTERRUPTED, 1)


def test_a_settle_that_the_replica_lacks_is_repeated_until_it_has_it(pair):
    record = claim(pair.store)
    with pair.frozen():
        for _ in range(3):
            with too_few():
                complete(pair.hasty, record)
            assert pair.plain.get(KEY).value == VALUE
            # What a connection has written itself is what a WAIT waits for: take another one.
            pair.hasty.close()
    wait_for(pair.in_step)
    assert complete(pair.store, record)
    assert pair.replicated()[:1] == b"C"


def test_a_settle_that_was_refused_waits_for_nobody(pair):
    record = claim(pair.store)
    pair.plain.forget(KEY)
    claim(pair.store)
    with pair.frozen():
        assert complete(pair.hasty, record) is False


def test_who_does_not_get_the_key_is_told_so_without_the_replica(pair):
    complete(pair.store, claim(pair.store, OTHER))
    claim(pair.store, fingerprint=bytes(16))
    with pair.frozen():
        assert isinstance(ask(pair.hasty), Held)
        assert isinstance(ask(pair.hasty, fingerprint=b"another........."), Mismatched)
        assert isinstance(ask(pair.hasty, OTHER), Settled)


def test_a_server_that_lost_the_scripts_is_waited_for_as_well(pair):
    pair.master.client.script_flush()
    record = claim(pair.store)
    assert pair.replicated()[:1] == b"P"
    pair.master.client.script_flush()
    assert complete(pair.store, record)
    assert pair.replicated()[:1] == b"C"
    with pair.frozen():
        pair.master.client.script_flush()
        with too_few():
            claim(pair.hasty, OTHER)


def test_more_replicas_than_there_are_is_never_enough(pair):
    store: Any = RedisStore(pair.master.url, replicas=2, replica_timeout_ms=10)
    with pytest.raises(StoreUnavailable, match="fewer than 2 replicas"):
        claim(store)
    assert pair.plain.get(KEY) is None
    store.close()


def test_a_replica_that_stopped_is_missed(tmp_path):
    binary = redis_binary()
    with running(binary, tmp_path) as master:
        with running(binary, tmp_path, "--replicaof", "127.0.0.1", master.port) as replica:
            pair = Pair(master, replica)
            wait_for(pair.in_step)
            record = claim(pair.store)
        with too_few():
            complete(pair.hasty, record)
        with too_few():
            claim(pair.hasty, OTHER)
        pair.store.close()
        pair.hasty.close()
        pair.plain.close()


def test_a_replica_itself_makes_the_store_unavailable(pair):
    claim(pair.store)
    store: Any = RedisStore(pair.replica.url, replicas=1)
    # It could answer this from what it has; only a master can say that replicas have it too.
    for identity in (KEY, OTHER):
        with pytest.raises(StoreUnavailable):
            ask(store, identity)
    store.close()


def test_an_answer_is_waited_for_longer_than_the_replica():
    def timeout(url, **options):
        store: Any = RedisStore(url, **options)
        return store._link._channel._connect().socket_timeout

    assert timeout("redis://h", replicas=1, replica_timeout_ms=30_000) == 35
    assert timeout("redis://h?socket_timeout=2", replicas=1) == 2
    assert timeout("redis://h", replicas=1, options={"socket_timeout": 3}) == 3


def test_a_cluster_is_refused():
    with pytest.raises(StoreMisconfigured, match="Cluster"):
        RedisStore("redis+cluster://h", replicas=1)


@pytest.mark.parametrize(
    "wrong", [{"replicas": -1}, {"replicas": 1, "replica_timeout_ms": 0}], ids=["-1", "no time"]
)
def test_what_redis_would_take_for_something_else_is_refused(wrong):
    with pytest.raises(InvalidOption, match="from"):
        RedisStore(**wrong)


def test_these_rights_are_enough(pair):
    commands = ("evalsha", "eval", "get", "set", "del", "time", "pttl", "wait", "zadd", "zrem")
    pair.master.client.acl_setuser(
        "idem",
        enabled=True,
        passwords=["+pw"],
        keys=["idem:*"],
        commands=[f"+{command}" for command in commands],
    )
    url = f"redis://idem:pw@127.0.0.1:{pair.master.port}"
    store: Any = RedisStore(url, replicas=1)
    assert complete(store, claim(store))
    store.close()
