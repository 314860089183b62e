"""`make demo` is run as a whole: its exit code is its judgement of the idempotent ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.workers import child_environment


@pytest.mark.worker
@pytest.mark.timeout(240)
def test_the_demonstration_enters_every_delivery_once_and_the_plain_task_does_not(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "testproject.demo", "--json", "--seed", "7"],
        cwd=ROOT,
        env=child_environment({"TMPDIR": tmp_path}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    deliveries = report["deliveries"]
    assert report["idempotent"]["rows"] == deliveries
    assert report["plain"]["rows"] > deliveries
    assert report["worker_kills"] + report["process_kills"] > 0
