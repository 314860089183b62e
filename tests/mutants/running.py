"""Runs tests on a copy of the installed package: as it is, or with a mutant in it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.paths import ROOT, find_installed_first

if TYPE_CHECKING:
    from tests.mutants.catalogue import Mutant

#: What pytest ends with.
_PASSED, _FAILED = 0, 1
#: The longest that tests may take without a mutant.
_PATIENCE_S = 900
_OPTIONS = (
    *("-q", "--tb=no", "-rfE", "-o", "addopts=", "--import-mode=importlib"),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:valkey", "-p", "no:django"),
)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What tests do without a mutant: those that failed are no proof, and are left out where there is one."""

    tests: str
    failed: tuple[str, ...]
    passed: int
    seconds: float
    #: Why these tests show nothing at all; empty if they show something.
    useless: str

    @property
    def timeout_s(self) -> float:
        """How long the tests may take with a mutant: past that they hang, which is noticed, too."""
        return 60 + 5 * self.seconds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a mutant: ``killed``, ``SURVIVED``, ``MISFIT`` or ``BROKEN``, and by which test or why."""

    word: str
    by: str
    seconds: float


def fits(mutant: Mutant) -> bool:
    """Is the text that the mutant replaces there, once?"""
    path = installed_package() / mutant.file
    return path.exists() and path.read_text().count(mutant.old) == 1


def measure(tests: str) -> Baseline:
    """Run tests without a mutant."""
    with _copy() as directory:
        run = _pytest(directory, shlex.split(tests), _PATIENCE_S)
    useless = ""
    if run.code is None:
        useless = f"took longer than {_PATIENCE_S} s"
    elif run.code not in (_PASSED, _FAILED):
        useless = f"pytest ended with {run.code}\n{run.log[-2000:]}"
    elif not run.passed:
        useless = "not one of them passed"
    return Baseline(
        tests=tests, failed=run.failed, passed=run.passed, seconds=run.seconds, useless=useless
    )


def try_out(mutant: Mutant, baselines: Sequence[Baseline]) -> Verdict:
    """Run tests with a mutant, one file after the other until one notices it."""
    begun = time.monotonic()
    word, by = "SURVIVED", ""
    if not fits(mutant):
        return Verdict(word="MISFIT", by="its text is not there once", seconds=0)
    for each in baselines:
        if each.useless:
            return Verdict(word="BROKEN", by=f"{each.tests} shows nothing", seconds=0)
        with _copy() as directory:
            target = directory / "celery_idempotent" / mutant.file
            target.write_text(target.read_text().replace(mutant.old, mutant.new))
            options = ("-x", *(f"--deselect={test}" for test in each.failed))
            run = _pytest(directory, [*options, *shlex.split(each.tests)], each.timeout_s)
        if run.code == _FAILED:
            word, by = "killed", (*run.failed, each.tests)[0]
        elif run.code is None:
            word, by = "killed", f"{each.tests} hung"
        elif run.code != _PASSED:
            word, by = "BROKEN", f"pytest ended with {run.code}\n{run.log[-2000:]}"
        if word != "SURVIVED":
            break
    return Verdict(word=word, by=by, seconds=time.monotonic() - begun)


@functools.cache
def installed_package() -> Path:
    """Return where the package under test is: not the source tree, which this process was started in."""
    find_installed_first()
    spec = find_spec("celery_idempotent")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    assert package.parent != ROOT, "celery-idempotent is not installed: make pytest"
    return package


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """Copy the package with its byte code, which saves a second a time; Python makes anew what a mutant makes stale."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as directory:
        shutil.copytree(installed_package(), Path(directory) / "celery_idempotent")
        yield Path(directory)


@dataclass(frozen=True, kw_only=True)
class _Run:
    #: pytest's exit code; ``None`` if it took too long.
    code: int | None
    failed: tuple[str, ...]
    passed: int
    seconds: float
    log: str


def _pytest(directory: Path, arguments: Sequence[str], timeout_s: float) -> _Run:
    """Run pytest on the package in a directory: tests/conftest.py puts the source tree last."""
    begun = time.monotonic()
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *_OPTIONS, f"--basetemp={directory}/tmp", *arguments],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "CI"}
            | {"PYTHONPATH": str(directory), "CELERY_IDEMPOTENT_THOROUGH": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    passed = re.search(r"(\d+) passed", text)
    return _Run(
        code=code,
        failed=tuple(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)),
        passed=int(passed[1]) if passed else 0,
        seconds=time.monotonic() - begun,
        log=text,
    )
