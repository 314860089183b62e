"""Where gevent or eventlet has patched threads, locks and sockets, in a worker or elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import need
from tests.support.workers import child_environment

HERE = Path(__file__).parent


#: Eventlet is patched by the same code of ours, in the same places.
KINDS = pytest.mark.parametrize(
    "kind", ["gevent", pytest.param("eventlet", marks=pytest.mark.wide)]
)


def start(program: str, kind: str, *arguments: str) -> subprocess.Popen[str]:
    need(importlib.util.find_spec(kind), kind)
    return subprocess.Popen(
        [sys.executable, str(HERE / program), kind, *arguments],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(program: subprocess.Popen[str]) -> Any:
    with program:
        try:
            out, error = program.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    assert program.returncode == 0, error
    return json.loads(out)


@pytest.mark.redis
@KINDS
def test_nobody_gets_the_answer_to_one_who_was_killed(kind: str, databases: Iterator[str]):
    found = result(start("crowding.py", kind, next(databases)))
    assert found["wrong"] == []
    assert found["killed"] == 60
    assert found["done"] >= 40 * 12
