"""A RedisStore settles a record and stores the task's result in one step, where both are in one database."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
import redis
from celery import Celery

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Record, ResultWrite, SettledWith, SettleRequest, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.verbs import KEY, claim
from tests.support.servers import EmbeddedRedis

PoolOf = Callable[..., redis.ConnectionPool]
CERTIFIED = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
MAIN = {"master_name": "main"}


def meta(state: str, **more: object) -> bytes:
    """Return a result as Celery writes it."""
    return json.dumps({"status": state, "result": 1, **more}).encode()


class TestWhatIsOneDatabase:
    """No server is asked."""

    @pytest.fixture
    def pool_of(self) -> Iterator[PoolOf]:
        apps: list[Celery] = []

        def pool_of(url: str, **settings: Any) -> redis.ConnectionPool:
            app = Celery(backend=url, set_as_current=False)
            app.conf.update(settings)
            apps.append(app)
            backend: Any = app.backend
            pool: redis.ConnectionPool = backend.client.connection_pool
            return pool

        yield pool_of
        for app in apps:
            app.close()

    @pytest.mark.parametrize(
        ("store", "backend", "settings"),
        [
            ("redis://h/0", "redis://h", {}),
            ("redis://h:6379", "redis://h/0", {}),
            ("redis://h:1/7?prefix=x&socket_timeout=1", "redis://h:1/7", {}),
            ("redis://localhost", "redis://", {}),
            ("redis://u:p@h/3", "redis://u:p@h/3", {}),
            ("redis://:p@h", "redis://h", {"redis_password": "p"}),
            ("redis://:a%2Fb@h", "redis://:a%2Fb@h", {}),
            ("unix:///run/redis.sock?db=2", "redis+socket:///run/redis.sock?virtual_host=2", {}),
            ("rediss://h/1", "rediss://h/1", {"redis_backend_use_ssl": CERTIFIED}),
            ("rediss://h", "rediss://h?ssl_cert_reqs=CERT_REQUIRED", {}),
        ],
    )
    def test_the_same(self, pool_of: PoolOf, store: str, backend: str, settings: Any):
        assert RedisStore(store).stores_results_of(pool_of(backend, **settings))

    @pytest.mark.parametrize(
        ("store", "backend", "settings"),
        [
            ("redis://h/0", "redis://h/1", {}),
            ("redis://h", "redis://i", {}),
            ("redis://localhost", "redis://127.0.0.1", {}),
            ("redis://h:1", "redis://h:2", {}),
            ("redis://h", "redis://:p@h", {}),
            ("redis://u:p@h", "redis://v:p@h", {}),
            ("redis://h", "redis://h", {"redis_username": "u"}),
            ("redis://h", "rediss://h?ssl_cert_reqs=CERT_NONE", {}),
            ("rediss://h?ssl_certfile=a", "rediss://h?ssl_cert_reqs=CERT_NONE&ssl_certfile=b", {}),
            ("unix:///run/a.sock", "redis+socket:///run/b.sock", {}),
            ("unix:///run/a.sock", "redis://localhost", {}),
            (
                "sentinel://h:1/main/0",
                "sentinel://h:1/0",
                {"result_backend_transport_options": MAIN},
            ),
            ("redis+cluster://h:1", "redis://h:1", {}),
            ("redis://h", "redis://h?encoding=latin-1", {}),
        ],
    )
    def test_another_or_perhaps_another(
        self, pool_of: PoolOf, store: str, backend: str, settings: Any
    ):
        assert not RedisStore(store).stores_results_of(pool_of(backend, **settings))

    @pytest.mark.skipif(celery.VERSION < (5, 6), reason="Celery has none before 5.6")
    def test_not_with_credentials_of_a_provider(self, pool_of: PoolOf):
        provider = redis.UsernamePasswordCredentialProvider("u", "p")
        pool = pool_of("redis://h", redis_backend_credential_provider=provider)
        assert not RedisStore("redis://h").stores_results_of(pool)

    def test_not_by_a_store_that_settles_in_its_own_way_or_by_another(self, pool_of: PoolOf):
        class Audited(RedisStore):
            def settle(self, request: SettleRequest) -> bool:
                return super().settle(request)

        pool = pool_of("redis://h")
        assert not Audited("redis://h").stores_results_of(pool)
        assert not MemoryStore().stores_results_of(pool)


@pytest.mark.redis
class TestSettlingWithAResult:
    @pytest.fixture
    def store(self, redis_store: RedisStore) -> RedisStore:
        return redis_store

    @pytest.fixture
    def record(self, store: RedisStore) -> Record:
        return claim(store)

    @pytest.fixture
    def name(self, prefix: str) -> str:
        return f"{prefix}-result"

    @pytest.fixture
    def heard(self, redis_client: redis.Redis, name: str) -> Iterator[Callable[[], list[bytes]]]:
        with redis_client.pubsub(ignore_subscribe_messages=True) as channel:
            channel.subscribe(name)
            channel.get_message(timeout=30)

            def heard() -> list[bytes]:
                """Return what was published until now."""
                redis_client.publish(name, "end")
                found: list[bytes] = []
                while (message := channel.get_message(timeout=30)) is not None:
                    if message["data"] == b"end":
                        return found
                    found.append(message["data"])
                raise AssertionError("nothing more is heard")

            yield heard

    @pytest.mark.parametrize(("expires_s", "left_s"), [(600, range(500, 601)), (0, (-1,))])
    def test_all_is_written_and_told(
        self, store, record, name, redis_client, heard, expires_s, left_s
    ):
        done = settle(store, record, name, meta("SUCCESS"), expires_s=expires_s)
        assert done == "stored"
        assert state_of(store) is State.COMPLETED
        assert redis_client.get(name) == meta("SUCCESS")
        assert redis_client.ttl(name) in left_s
        assert heard() == [meta("SUCCESS")]

    def test_a_late_worker_stores_and_tells_nothing(self, store, record, name, redis_client, heard):
        assert store.release(KEY, token=record.token)
        claim(store)
        assert settle(store, record, name, meta("SUCCESS")) == "lost"
        assert state_of(store) is State.PROCESSING
        assert redis_client.get(name) is None
        assert heard() == []

    @pytest.mark.parametrize("restore", [False, True])
    def test_a_record_that_was_forgotten_is_settled_by_who_may_bring_it_back(
        self, store, record, name, redis_client, restore
    ):
        store.forget(KEY)
        done = settle(store, record, name, meta("SUCCESS"), restore=restore)
        # The backend has to store the result.
        assert done == ("settled" if restore else "lost")
        assert state_of(store) is (State.COMPLETED if restore else None)
        assert redis_client.get(name) is None

    @pytest.mark.parametrize("state", ["SUCCESS", "FAILURE"])
    def test_a_repetition_stores_and_tells_nothing_twice(
        self, store, record, name, redis_client, heard, state
    ):
        done = [settle(store, record, name, meta(state)) for _ in range(3)]
        assert done == ["stored", "settled", "settled"]
        assert redis_client.get(name) == meta(state)
        assert heard() == [meta(state)]

    @pytest.mark.parametrize("state", ["STARTED", "RETRY", "FAILURE", "50 % of it"])
    def test_any_other_state_is_written_over(self, store, record, name, redis_client, heard, state):
        redis_client.set(name, meta(state))
        assert settle(store, record, name, meta("SUCCESS")) == "stored"
        assert redis_client.get(name) == meta("SUCCESS")
        assert redis_client.ttl(name) > 500
        assert heard() == [meta("SUCCESS")]

    @pytest.mark.parametrize(
        ("known", "done"),
        [
            pytest.param(meta("SUCCESS", worker="1"), "stored", id="an earlier success"),
            pytest.param(b"\x80\x05pickled", "settled", id="pickle"),
            pytest.param(b'{"result": 1, "status": "SUCCESS"}', "settled", id="order"),
            pytest.param(b'{"status": "a\\"b"}', "settled", id="a quote"),
            pytest.param(b"", "settled", id="nothing"),
            pytest.param(["a list"], "settled", id="no string"),
        ],
    )
    def test_an_earlier_success_and_what_only_the_backend_can_read_stay(
        self, store, record, name, redis_client, heard, known, done
    ):
        if isinstance(known, bytes):
            redis_client.set(name, known)
        else:
            redis_client.lpush(name, *known)
        before = redis_client.dump(name)
        assert settle(store, record, name, meta("SUCCESS")) is done
        assert state_of(store) is State.COMPLETED
        assert redis_client.dump(name) == before
        assert heard() == []


@pytest.mark.redis
class TestRightsThatAreMissing:
    ALL = ("~*", "&*", "+@all")

    def test_the_record_has_its_end_and_the_backend_the_result(self, store_with, server):
        store = store_with(*self.ALL, "-publish")
        record = claim(store)
        assert settle(store, record, "n", meta("SUCCESS")) == "settled"
        assert state_of(store) is State.COMPLETED
        # Where a success is, the backend would publish nothing.
        assert server.client.get("n") is None

    def test_a_server_that_refuses_the_script_is_not_asked_again(
        self, store_with, caplog: pytest.LogCaptureFixture
    ):
        store = store_with("~idem:*", "&*", "+@all")
        first = claim(store)
        assert settle(store, first, "n", meta("SUCCESS")) == "settled"
        assert state_of(store) is State.COMPLETED
        assert "results are stored apart from records" in caplog.text
        caplog.clear()
        store.forget(KEY)
        second = claim(store)
        assert settle(store, second, "n", meta("SUCCESS")) == "settled"
        assert settle(store, first, "n", meta("SUCCESS")) == "lost"
        assert not store.write_result(ResultWrite(key=b"n", payload=b"x", expires_s=600))
        assert not caplog.text

    def test_what_the_settle_itself_is_refused_is_raised(self, store_with, server):
        store = store_with(*self.ALL)
        record = claim(store)
        server.client.execute_command("ACL", "SETUSER", "u", "-evalsha")
        with pytest.raises(StoreMisconfigured):
            settle(store, record, "n", meta("SUCCESS"))
        server.client.execute_command("ACL", "SETUSER", "u", "+evalsha")
        # A login or a right that was missing for a while is no reason to give up.
        assert settle(store, record, "n", meta("SUCCESS")) == "stored"


@pytest.mark.redis
def test_a_full_server_tells_no_result_that_it_does_not_store(private_redis: EmbeddedRedis):
    url = private_redis.url()
    store = RedisStore(url)
    result = ResultWrite(key=b"n", payload=meta("SUCCESS"), expires_s=600)
    with redis.Redis.from_url(url) as client, client.pubsub() as channel:
        channel.subscribe("n")
        channel.get_message(timeout=30)
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreUnavailable):
                store.write_result(result)
        finally:
            client.config_set("maxmemory", 0)
        client.publish("n", "end")
        told: dict[str, Any] = channel.get_message(timeout=30)
        assert told["data"] == b"end"
        assert store.write_result(result)
        assert client.get("n") == result.payload
    store.close()


def settle(
    store: Any,
    record: Record,
    name: str,
    payload: bytes,
    state: Any = State.COMPLETED,
    expires_s: int = 600,
    restore: bool = True,
) -> SettledWith:
    request = SettleRequest(record=record, state=state, value=None, keep_ms=60_000, restore=restore)
    result = ResultWrite(key=name.encode(), payload=payload, expires_s=expires_s)
    settled: SettledWith = store.settle_with_result(request, result)
    return settled


def state_of(store: Any) -> State | None:
    record = store.get(KEY)
    return record.state if record else None
