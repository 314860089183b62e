"""What users run: a program or test suite of theirs in a directory of its own, and the wheel that they install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.workers import child_environment


def python(
    directory: Path, *arguments: str, succeeds: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python there, with its modules to import and warnings as errors; it has to end as expected."""
    env, code = {"PYTHONPATH": str(directory)}, 0 if succeeds else 1
    return run("-W", "error", *arguments, cwd=directory, env=env, code=code)


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, object] | None = None,
    code: int = 0,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run Python with what this process imports; it has to end with the ``code``."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=child_environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
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
