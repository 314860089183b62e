"""RedisStore in trouble: lost answers, dead connections, forks, exceptions out of nowhere."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Claimed, Held, Identity, State
from celery_idempotent.stores.redis.servers import SOURCES
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.verbs import KEY, LEASE_MS, VALUE, ask, claim, renew, reserve, settle
from tests.support.tiers import examples

pytestmark = pytest.mark.redis


def other(key: object) -> Identity:
    return Identity(namespace="other", key=f"{key}")


@pytest.fixture
def store(private_redis):
    store = RedisStore(private_redis.url())
    yield store
    store.close()


@pytest.fixture
def proxied(redis_proxy, direct):
    """A store behind a proxy that can break its connections; the server knows the scripts."""
    for source in SOURCES.values():
        direct.script_load(source)
    store = RedisStore(redis_proxy.url() + "?socket_timeout=2")
    yield store
    store.close()


@pytest.fixture
def direct(private_redis):
    client = redis.Redis.from_url(private_redis.url())
    yield client
    client.close()


class TestConnections:
    def test_idle_connections_that_the_server_closed_are_not_noticed(self, redis_proxy, proxied):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: ask(proxied, other(n)), range(64)))
        redis_proxy.cut()
        assert isinstance(ask(proxied), Claimed)

    def test_connections_are_used_again(self, store, direct):
        before = direct.info("stats")["total_connections_received"]
        for _ in range(50):
            ask(store)
        assert direct.info("stats")["total_connections_received"] == before + 1

    def test_a_server_that_is_away_makes_the_store_unavailable(self, redis_proxy, proxied):
        record = claim(proxied)
        redis_proxy.refuse()
        for verb in (
            lambda: ask(proxied),
            lambda: settle(proxied, record),
            lambda: proxied.get(KEY),
            lambda: proxied.sweep(limit=10),
            lambda: proxied.prune(limit=10),
            lambda: proxied.release(KEY, token=record.token),
        ):
            with pytest.raises(StoreUnavailable, match="did not answer") as caught:
                verb()
            assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
        redis_proxy.heal()
        assert settle(proxied, record)

    def test_a_frozen_server_is_waited_for_no_longer_than_the_timeout(self, private_redis):
        store = RedisStore(private_redis.url() + "?socket_timeout=0.2")
        claim(store)
        private_redis.freeze()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            ask(store)
        assert time.monotonic() - started < 2
        private_redis.thaw()
        assert isinstance(ask(store), Held)
        store.close()


class TestScripts:
    def test_a_server_that_lost_the_scripts_gets_them_again(self, store, direct):
        record = claim(store)
        direct.script_flush()
        others = [claim(store, other(n)) for n in range(5)]
        direct.script_flush()
        assert renew(store, record, *others, lease_ms=1) == [True] * 6
        time.sleep(0.01)
        direct.script_flush()
        assert len(store.sweep(limit=10).interrupted) == 6
        direct.script_flush()
        assert settle(store, record)

    def test_a_flush_between_claim_and_settle_loses_no_result(self, store, direct):
        record = claim(store)
        direct.flushall()
        assert renew(store, record, lease_ms=1) == [False]
        assert settle(store, record)
        assert store.get(KEY).value == VALUE


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class TestForks:
    def test_a_child_leaves_its_parents_connections_alone(self, store):
        record = claim(store)
        children = []
        for n in range(3):
            pid = os.fork()
            if not pid:
                with contextlib.suppress(BaseException):
                    for m in range(100):
                        claim(store, other(f"child {n}-{m}"))
                    store.close()
                    os._exit(0)
                os._exit(1)
            children.append(pid)
        for m in range(200):
            identity = other(m)
            assert claim(store, identity).identity == identity
            assert store.get(identity) is not None
        for pid in children:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert settle(store, record)
        assert store._link._idle


class Interrupted(BaseException):
    """What SoftTimeLimitExceeded and SystemExit do to a task."""


class TestExceptionsOutOfNowhere:
    # It may strike in a finalizer, too, where nobody can catch it.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_no_answer_is_ever_taken_for_another(self, store):
        """A signal handler raises at random moments; each answer still is to its own question."""

        def strike(number, frame):
            raise Interrupted

        rounds, interrupted = examples(250, 600), 0
        randomness = random.Random(17)
        before = signal.signal(signal.SIGALRM, strike)
        heartbeats = self._heartbeats(store)
        try:
            for n in range(rounds):
                identity = other(n)
                try:
                    signal.setitimer(signal.ITIMER_REAL, randomness.uniform(20e-6, 600e-6))
                    for m in range(20):
                        self._life(store, identity, f"{n}-{m}")
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupted += 1
                self._life(store, other(f"after {n}"), f"{n}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            mixed_up = heartbeats()
        assert interrupted > rounds / 2
        assert not mixed_up

    def _life(self, store, identity, text):
        record = claim(store, identity, task_id=text)
        assert (record.identity, record.task_id) == (identity, text)
        found = store.get(identity)
        assert found.task_id == text
        assert store.release(identity, token=record.token)

    def _heartbeats(self, store):
        """Use the same connections from another thread, which no signal interrupts."""
        done = threading.Event()
        mixed_up = []

        def beat():
            n = 0
            while not done.is_set():
                n += 1
                try:
                    self._life(store, other(f"beat {n}"), f"beat {n}")
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    mixed_up.append(error)

        thread = threading.Thread(target=beat)
        thread.start()

        def stop():
            done.set()
            thread.join()
            return mixed_up

        return stop


class TestRefusals:
    def test_a_full_server_takes_no_new_claim_but_finishes_what_it_let_in(self, store, direct):
        record = claim(store)
        swept = claim(store, other(1), lease_ms=1)
        again = claim(
            store,
            other(2),
            lease_ms=1,
            on_stale="requeue",
            message=b"x" * 1000,
        )
        retried = other("retried")
        reserve(store, retried)
        token = claim(store, retried).token
        time.sleep(0.01)
        used = direct.info("memory")["used_memory"]
        direct.config_set("maxmemory", used // 2)
        direct.config_set("maxmemory-policy", "noeviction")
        try:
            with pytest.raises(StoreUnavailable, match=r"memory|OOM"):
                ask(store, other("n"))
            # There is no room for a note of it.
            assert isinstance(ask(store, KEY), Held)
            assert renew(store, record) == [True]
            with pytest.raises(StoreUnavailable, match=r"memory|OOM"):
                reserve(store, other("n"))
            report = store.sweep(limit=10)
            assert [each.token for each in report.interrupted] == [swept.token]
            assert [each.token for each in report.requeued] == [again.token]
            assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
            assert store.release(retried, token=token, requeue_ms=LEASE_MS)
            assert store.get(retried).state is State.QUEUED
            assert settle(store, record)
            assert store.mark_delivered(KEY, token=record.token)
            assert store.get(KEY).value == VALUE
            assert store.health().problem == "read-only"
        finally:
            direct.config_set("maxmemory", 0)
        assert store.health().problem is None

    def test_a_replica_makes_the_store_unavailable(self, store, direct, private_redis):
        claim(store)
        direct.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(StoreUnavailable):
                ask(store, other("n"))
            assert not store._link._idle  # its name may lead to another server by now
        finally:
            direct.replicaof("NO", "ONE")
        assert isinstance(ask(store), Held)

    def test_a_database_or_a_host_that_does_not_exist(self, private_redis):
        with pytest.raises(StoreMisconfigured):
            RedisStore(private_redis.url(db=9999)).get(KEY)
        with pytest.raises(StoreUnavailable):
            RedisStore("redis://nowhere.invalid:1").get(KEY)
