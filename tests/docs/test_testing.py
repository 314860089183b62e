"""docs/testing.md: its example suites pass, and the report that it shows is the one that comes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.workers import child_environment

PAGE = (ROOT / "docs" / "testing.md").read_text()
SHOW = """
from bank import careless, transfers
from celery_idempotent.testing import crash_matrix

try:
    crash_matrix(careless, arguments=lambda name: [name], effects=transfers)
except AssertionError as report:
    print(report)
"""


def python(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env=child_environment() | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_of_the_page_pass(tmp_path):
    for name, code in re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).write_text(f"# {name}\n{code}")
    options = ("-p", "no:cacheprovider", "-p", "no:valkey", "-p", "no:django")
    passed = python(
        tmp_path, "-m", "pytest", "-q", *options, "test_deliveries.py", "test_crashes.py"
    )
    assert "3 passed" in passed
    (shown,) = re.findall(r"test_testing\.py -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert python(tmp_path, "-c", SHOW) == shown
