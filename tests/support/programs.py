"""What users run: a program or test suite of theirs in a directory of its own, and the wheel that they install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.workers import child_environment


def python(
    directory: Path, *arguments: str, succeeds: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python there, with its modules to import and warnings as errors; it has to end as expected."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env=child_environment() | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done


def build_wheel(directory: Path) -> Path:
    """Build the wheel there, from a copy of the source, and return its path."""
    source = directory / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "celery_idempotent", source / "celery_idempotent", ignore=ignore)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", directory)
    command = (sys.executable, "-m", "pip", "wheel", *options, source)
    subprocess.run(command, check=True, timeout=120)
    (found,) = directory.glob("*.whl")
    return found
