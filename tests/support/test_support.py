"""The helpers that other tests rely on do what they promise."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support import servers
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment


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
