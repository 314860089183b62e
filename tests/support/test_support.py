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
        "preloaded._CELERY = preloaded._PACKAGE = ''\n"
        "command = [sys.executable, '-m', 'http.server', '--bind', '127.0.0.1', '0']\n"
        "with open(os.devnull, 'wb') as log:\n"
        "    process = preloaded.spawn(command, cwd=Path(), env=child_environment(), log=log)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program]
    alone = child_environment({"PYTEST_XDIST_TESTRUNUID": ""})
    asking = subprocess.run(command, env=alone, stdout=subprocess.PIPE, timeout=60, check=False)
    assert asking.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(int(asking.stdout)), what="the end of the forked process")


@pytest.mark.redis
class TestProxy:
    @pytest.mark.parametrize(
        ("silent", "error"), [(False, redis.ConnectionError), (True, redis.TimeoutError)]
    )
    def test_loses_a_reply_after_the_server_executed_the_request(
        self, redis_proxy: Proxy, private_redis: EmbeddedRedis, silent: bool, error: type[Exception]
    ):
        redis_proxy.swallow_replies(b"counter", silent=silent)
        with connect(redis_proxy.url()) as client, connect(private_redis.url()) as direct:
            with pytest.raises(error):
                client.incr("counter")
            assert direct.get("counter") == b"1"
            assert client.incr("counter") == 2
        assert redis_proxy.swallowed == 1

    def test_loses_a_request_before_the_server_sees_it(self, redis_proxy: Proxy, private_redis):
        redis_proxy.lose_requests(b"counter")
        with connect(redis_proxy.url()) as client, connect(private_redis.url()) as direct:
            with pytest.raises(redis.ConnectionError):
                client.incr("counter")
            assert direct.get("counter") is None
        assert redis_proxy.lost == 1
