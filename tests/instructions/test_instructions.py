"""A guard against getting slower: how many instructions our own code has a processor execute, by valgrind's cachegrind.

Each as a ratio to something that is not ours, counted in the same run: another build of Python changes both sides. The
ratios are in instructions.json; CONTRIBUTING.md says how to renew them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions
from tests.support.debian import program
from tests.support.servers import EmbeddedRedis, need

RENEW_VARIABLE = "CELERY_IDEMPOTENT_RENEW_INSTRUCTIONS"
FILE = Path(__file__).with_name("instructions.json")
STORED: dict[str, Any] = json.loads(FILE.read_text())
RENEWS = bool(os.environ.get(RENEW_VARIABLE))

#: What is counted: its baseline, then what is held against that.
COUNTED = {
    "verb": (
        "bare EVALSHA",
        "claim",
        "settle with the task's result",
        "claim of a completed key (replay)",
    ),
    "publish": ("plain", "by_task_id", "by_argument"),
}
#: The same comes out within 1 %.
SLACK = 0.03
_MORE = 50


def versions() -> dict[str, str]:
    """Return what changes a ratio, too."""
    full = {"python": platform.python_version()}
    for name in ("celery", "redis", "hiredis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            full[name] = importlib.metadata.version(name)
    return {name: ".".join(version.split(".")[:2]) for name, version in full.items()}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not RENEWS and versions() != STORED["versions"],
        reason=f"instructions.json was counted with {STORED['versions']}",
    ),
]


@pytest.mark.parametrize("kind", ["verb", pytest.param("publish", marks=pytest.mark.wide)])
def test_our_code_takes_no_more_instructions_than_before(
    private_redis: EmbeddedRedis, tmp_path: Path, kind: str
) -> None:
    need(program("valgrind", package="valgrind"), "valgrind")
    counts = instructions.count(kind, COUNTED[kind], _MORE, private_redis, tmp_path)
    baseline = counts.pop(COUNTED[kind][0])
    ratios = {name: round(count / baseline, 3) for name, count in counts.items()}
    if RENEWS:
        STORED["versions"] = versions()
        STORED["ratios"][kind] = ratios
        FILE.write_text(json.dumps(STORED, indent=2) + "\n")
    stored = STORED["ratios"][kind]
    assert ratios.keys() == stored.keys()
    assert {
        name: ratio for name, ratio in ratios.items() if ratio > stored[name] * (1 + SLACK)
    } == {}, f"more than in instructions.json: {stored}"
