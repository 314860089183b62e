"""The helpers that other tests rely on do what they promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import redis

from tests.support import servers
from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment


def connect(url, **options):
    return redis.Redis.from_url(url, socket_timeout=1, retry=None, **options)


def test_waiting_in_vain_says_for_what():
    with pytest.raises(
        AssertionError, match=r"waited 0\.1 s in vain for a miracle; last value: None"
    ):
        wait_for(lambda: None, 0.1, "a miracle")


def test_a_missing_service_skips_on_a_laptop_and_fails_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        servers.need(False, "the moon")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="the moon is missing"):
        servers.need(False, "the moon")


def test_the_ledger_reads_what_was_appended(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.entries() == []
    ledger.append("start", 17, "id")
    ledger.append("end", "17", "id")
    assert ledger.count() == 2
    assert ledger.count("start", 17) == 1
    assert ledger.entries("end")[0].pid == os.getpid()


def test_a_preloaded_process_ends_with_the_one_that_asked_for_it_when_that_is_killed():
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.support import preloaded\n"
        "from tests.support.workers import child_environment\n"
        "preloaded._CELERY = preloaded._PACKAGE = ()\n"
        "command = [sys.executable, '-m', 'http.server', '--bind', '127.0.0.1', '0']\n"
        "with open(os.devnull, 'wb') as log:\n"
        "    process = preloaded.spawn(command, cwd=Path(), env=child_environment(), log=log)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program]
    asking = subprocess.run(
        command, env=child_environment(), stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert asking.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(int(asking.stdout)), what="the end of the forked process")


@pytest.mark.redis
def test_a_shared_redis_is_left_as_it_was(redis_client, prefix):
    redis_client.set(f"{prefix}:x", 1)
    assert redis_client.exists(f"{prefix}:x")


@pytest.mark.redis
def test_a_private_redis_comes_back_empty_whatever_was_done_to_it(private_redis, request):
    with connect(private_redis.url()) as client:
        client.set("x", 1)
    private_redis.freeze()
    private_redis.thaw()
    private_redis.kill()
    private_redis.start()
    with connect(private_redis.url()) as client:
        assert client.dbsize() == 0


@pytest.mark.redis
def test_a_persistent_redis_keeps_its_data_over_a_crash(persistent_redis):
    with connect(persistent_redis.url()) as client:
        client.set("x", 1)
    port = persistent_redis.port
    persistent_redis.kill()
    persistent_redis.start()
    assert persistent_redis.port == port
    with connect(persistent_redis.url()) as client:
        assert client.get("x") == b"1"


@pytest.mark.redis
class TestProxy:
    def test_forwards_until_told_otherwise(self, redis_proxy: Proxy):
        with connect(redis_proxy.url()) as client:
            assert client.set("x", "y" * 200_000)
            assert client.get("x") == b"y" * 200_000
        assert redis_proxy.connections == 1

    def test_loses_a_reply_after_the_server_executed_the_request(
        self, redis_proxy: Proxy, private_redis: EmbeddedRedis
    ):
        redis_proxy.swallow_replies(b"counter")
        with connect(redis_proxy.url()) as client, connect(private_redis.url()) as direct:
            with pytest.raises(redis.ConnectionError):
                client.incr("counter")
            assert direct.get("counter") == b"1"
            assert client.incr("counter") == 2
        assert redis_proxy.swallowed == 1

    def test_stays_silent_until_the_client_gives_up(self, redis_proxy: Proxy, private_redis):
        redis_proxy.swallow_replies(b"counter", silent=True)
        with connect(redis_proxy.url()) as client, connect(private_redis.url()) as direct:
            with pytest.raises(redis.TimeoutError):
                client.incr("counter")
            assert direct.get("counter") == b"1"

    def test_loses_a_request_before_the_server_sees_it(self, redis_proxy: Proxy, private_redis):
        redis_proxy.lose_requests(b"counter")
        with connect(redis_proxy.url()) as client, connect(private_redis.url()) as direct:
            with pytest.raises(redis.ConnectionError):
                client.incr("counter")
            assert direct.get("counter") is None
        assert redis_proxy.lost == 1

    def test_cuts_refuses_delays_and_heals(self, redis_proxy: Proxy):
        with connect(redis_proxy.url()) as client:
            assert client.ping()
            redis_proxy.refuse()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            redis_proxy.heal()
            assert client.ping()
            redis_proxy.delay(1.5)
            with pytest.raises(redis.TimeoutError):
                client.ping()
            redis_proxy.heal()
            assert client.ping()
            redis_proxy.cut()
            wait_for(lambda: pings(client), 30, "the proxy to take new connections")


def pings(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


@pytest.mark.worker
class TestWorker:
    @pytest.fixture
    def env(self, private_redis):
        return {"BROKER_URL": private_redis.url(0), "RESULT_BACKEND": private_redis.url(1)}

    @pytest.fixture
    def send(self, env):
        from celery import Celery

        app = Celery(broker=env["BROKER_URL"], backend=env["RESULT_BACKEND"])
        yield lambda *args, **options: app.send_task("echo", args, **options)
        close_app(app)

    def test_runs_tasks_and_notes_their_effects(self, start_worker, env, send, ledger):
        worker = start_worker("tests.support.echo_app", env=env)
        assert send("a").get(timeout=60) == "a"
        assert [entry.phase for entry in ledger.entries(key="a")] == ["start", "end"]
        assert ledger.entries()[0].pid in worker.children()
        worker.stop()
        assert worker.exit_code == 0

    def test_loses_a_child_and_replaces_it(self, start_worker, env, send, ledger):
        worker = start_worker("tests.support.echo_app", env=env, concurrency=2)
        send("a", 60)
        child = wait_for(lambda: ledger.entries("start", "a"), what="the task to start")[0].pid
        worker.kill_child(child)
        wait_for(
            lambda: child not in worker.children() and len(worker.children()) == 2,
            what="a new child",
        )
        assert ledger.count("end") == 0
        assert worker.running

    def test_dies_with_all_its_children(self, start_worker, env):
        worker = start_worker("tests.support.echo_app", env=env, concurrency=2)
        children = worker.children()
        assert len(children) == 2
        worker.kill()
        assert worker.exit_code == -signal.SIGKILL
        assert not any(map(alive, children))

    def test_does_nothing_while_frozen(self, start_worker, env, send, ledger):
        worker = start_worker("tests.support.echo_app", env=env)
        child = worker.children()[0]
        worker.freeze(child)
        result = send("a")
        wait_for(lambda: "received" in worker.log, what="the main process to take the message")
        assert ledger.count() == 0
        worker.thaw(child)
        assert result.get(timeout=60) == "a"
        worker.freeze()

    def test_is_shown_to_end_at_once_when_its_app_cannot_be_imported(self, start_worker):
        with pytest.raises(AssertionError, match="module no_such_app was not found"):
            start_worker("no_such_app")

    @pytest.mark.rabbitmq
    def test_takes_its_tasks_from_rabbitmq(self, start_worker, env, rabbitmq_url, rabbitmq_queue):
        from celery import Celery

        env |= {"BROKER_URL": rabbitmq_url, "QUEUE": rabbitmq_queue}
        start_worker("tests.support.echo_app", env=env)
        app = Celery(broker=rabbitmq_url, backend=env["RESULT_BACKEND"])
        assert app.send_task("echo", ["a"], queue=rabbitmq_queue).get(timeout=60) == "a"
        close_app(app)
