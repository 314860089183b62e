"""RedisStore on servers of every kind, and with every parser."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_idempotent import stores
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Identity, Selection, State
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.servers import Server, free_port, redis_binary, running, sentinel, valkey_binary
from tests.stores.verbs import KEY, VALUE, claim, renew, settle, use
from tests.support.servers import need
from tests.support.waiting import wait_for

pytestmark = pytest.mark.redis


open_store: Any = stores.open_store


class TestUnixSocket:
    @pytest.mark.parametrize("binary", [redis_binary, valkey_binary])
    def test_a_store_uses_a_unix_socket(self, tmp_path, binary):
        options = ("--unixsocket", "s", "--requirepass", "++s3cret:/@")
        client = {"password": "++s3cret:/@"}
        with running(binary(), tmp_path, *options, client=client) as server:
            path = tmp_path / str(server.port) / "s"
            store = open_store(f"unix://:%2B%2Bs3cret%3A%2F%40@{path}?db=3&prefix=mine")
            use(store)
            claim(store)
            with redis.Redis(port=server.port, db=3, **client) as client:
                assert all(name.startswith(b"mine:{") for name in client.scan_iter())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(shutil.which("openssl"), "openssl")
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory


@pytest.fixture(scope="module")
def tls_server(certificates: Path, tmp_path_factory: pytest.TempPathFactory):
    binary = redis_binary()
    files = [
        *("--tls-cert-file", certificates / "cert.pem", "--tls-key-file", certificates / "key.pem"),
        *("--tls-ca-cert-file", certificates / "cert.pem", "--tls-auth-clients", "no"),
    ]
    directory = tmp_path_factory.mktemp("tls-server")
    port = str(free_port())
    with running(binary, directory, *files, "--tls-port", port) as server:
        yield int(port), server


class TestTLS:
    def test_a_store_speaks_tls(self, tls_server, certificates):
        use(
            open_store(
                f"rediss://localhost:{tls_server[0]}/0?ssl_ca_certs={certificates / 'cert.pem'}"
            )
        )

    def test_an_unknown_certificate_makes_the_store_unavailable(self, tls_server):
        store = open_store(f"rediss://localhost:{tls_server[0]}/0")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            store.get(KEY)


class TestPasswords:
    """Rights are in test_redis_rights.py."""

    @pytest.mark.parametrize("login", ["", "idem:hunter2@"])
    def test_a_wrong_or_missing_password_is_a_misconfiguration_and_not_told(self, tmp_path, login):
        password = {"password": "pw"}
        with running(redis_binary(), tmp_path, "--requirepass", "pw", client=password) as server:
            store = open_store(f"redis://{login}127.0.0.1:{server.port}")
            with pytest.raises(StoreMisconfigured, match="password") as caught:
                store.get(KEY)
            assert "hunter2" not in f"{caught.value} {store!r}"


class TestParsers:
    @pytest.mark.parametrize("protocol", [2, 3])
    @pytest.mark.parametrize("parser", ["_RESP2Parser", "_HiredisParser"])
    def test_a_store_works_with_either_parser(self, redis_url, prefix, parser, protocol):
        from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser

        if parser == "_HiredisParser":
            pytest.importorskip("hiredis")
            chosen: type[Any] = _HiredisParser
        else:
            chosen = _RESP2Parser if protocol == 2 else _RESP3Parser
        options = {"parser_class": chosen, "protocol": protocol}
        store: Any = RedisStore(redis_url, prefix=prefix, options=options)
        assert type(store._link._connect()._parser) is chosen
        use(store)
        store.count({("charge", "completed"): 2})
        assert [each.count for each in store.counts(hours=1)] == [2]
        assert store.interrupt(KEY, token=claim(store).token)
        (server,) = store.facts()
        assert server.persistent in (True, False)
        assert server.release >= (6, 2)
        interrupted = Selection(states=frozenset({State.INTERRUPTED}))
        assert [each.identity for each in store.list(interrupted).records] == [KEY]

    @pytest.mark.parametrize("query", ["decode_responses=true", "encoding=latin-1"])
    def test_no_option_of_the_url_changes_what_is_read(self, redis_url, prefix, query):
        use(open_store(f"{redis_url}?prefix={prefix}&{query}"))


class TestCluster:
    @pytest.fixture
    def store(self, cluster_url, cluster_nodes):
        store = open_store(cluster_url)
        yield store
        store.close()
        for node in cluster_nodes:
            node.client.flushall()

    def test_records_spread_over_all_nodes(self, store, cluster_nodes):
        for n in range(300):
            claim(store, Identity(namespace="charge", key=f"{n}"), lease_ms=1)
        for node in cluster_nodes:
            assert node.client.dbsize() > 100
        time.sleep(0.01)
        assert len(store.sweep(limit=1000).interrupted) == 300

    def test_one_address_is_enough_and_a_dead_one_does_no_harm(self, cluster_nodes):
        port = cluster_nodes[1].port
        use(open_store(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}"))

    def test_no_address_that_answers_makes_the_store_unavailable(self):
        with pytest.raises(StoreUnavailable):
            open_store("redis+cluster://127.0.0.1:1,127.0.0.1:2").get(KEY)

    def test_a_store_follows_a_slot_that_moves(self, store, cluster_nodes):
        """Before, during and after the move, each verb finds its keys."""
        record = claim(store)
        name = store._keys.of_record(KEY)[0]
        slot = cluster_nodes[0].client.execute_command("CLUSTER", "KEYSLOT", name)
        (source,) = [
            n for n in cluster_nodes if n.client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot)
        ]
        target = next(node for node in cluster_nodes if node is not source)
        ids = {
            n.port: n.client.execute_command("CLUSTER", "MYID").decode() for n in (source, target)
        }
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
        assert store.get(KEY) == record
        keys = source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert len(keys) == 2
        source.client.migrate("127.0.0.1", target.port, keys, 0, 5000)
        # The slot is the source's still, and asks for everything to be looked up at the target.
        assert store.get(KEY) == record
        assert renew(store, record) == [True]
        for node in (target, source):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
        assert renew(store, record) == [True]
        assert settle(store, record)
        assert store.get(KEY).value == VALUE
        assert target.client.exists(name)


def ask(watcher: Server) -> Any:
    """What a Sentinel knows. Not sentinel_master(): redis-py 6.4 cannot call it on a client of its own."""
    return watcher.client.execute_command("SENTINEL MASTER", "main")


class TestSentinel:
    @pytest.fixture
    def servers(self, tmp_path) -> Iterator[tuple[Server, Server, Server]]:
        """A master, a replica, and a Sentinel, which looks for new ones only every ten seconds."""
        binary = redis_binary()
        with (
            running(binary, tmp_path) as master,
            running(binary, tmp_path, "--replicaof", "127.0.0.1", master.port) as replica,
        ):
            wait_for(lambda: replica.client.info("replication")["master_link_status"] == "up")
            with sentinel(binary, tmp_path, master, "main") as watcher:
                wait_for(lambda: ask(watcher)["num-slaves"] == 1, 60)
                yield master, replica, watcher

    def test_a_store_follows_a_failover(self, servers):
        master, replica, watcher = servers
        with pytest.raises(StoreUnavailable, match="other"):
            open_store(f"sentinel://127.0.0.1:{watcher.port}/other").get(KEY)
        store = open_store(f"sentinel://127.0.0.1:1;127.0.0.1:{watcher.port}/main/2?prefix=p")
        use(store)
        record = claim(store)
        copy = redis.Redis(port=replica.port, db=2)
        wait_for(lambda: copy.dbsize() == master.client.info("keyspace")["db2"]["keys"])
        master.process.kill()
        master.process.wait(10)
        with pytest.raises(StoreUnavailable):
            store.get(KEY)

        def settled():
            with contextlib.suppress(StoreUnavailable):
                return settle(store, record)

        wait_for(settled, 20, "the failover")
        assert replica.client.info("replication")["role"] == "master"
        assert store.get(KEY).value == VALUE
        store.close()

    def test_a_master_that_was_demoted_is_left(self, servers):
        """A planned failover closes no connection: the answer READONLY is what tells."""
        master, replica, watcher = servers
        store = open_store(f"sentinel://127.0.0.1:{watcher.port}/main")
        use(store)
        assert store.get(KEY) is None  # leaves an idle connection
        wait_for(lambda: _failed_over(watcher), 60, "the sentinel to know its replica")
        wait_for(lambda: ask(watcher)["port"] == replica.port, 15)
        # Sentinel would do this as well, some ten seconds later.
        master.client.replicaof("127.0.0.1", replica.port)
        claim(store)
        assert replica.client.dbsize() > 0
        store.close()


def _failed_over(watcher: Server) -> bool:
    try:
        return bool(watcher.client.execute_command("SENTINEL", "FAILOVER", "main"))
    except redis.ResponseError:
        return False
