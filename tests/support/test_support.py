"""The helpers that other tests rely on do what they promise."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import redis

from tests.support import servers
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
