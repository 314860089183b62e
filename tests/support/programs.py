"""Running a user's program or test suite in a directory of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.workers import child_environment

__all__ = ["python"]


def python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, with its modules to import and warnings as errors; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env=child_environment() | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
