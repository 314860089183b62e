"""Runs tests on a copy of the installed package: as it is, or with a mutant in it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.support.paths import ROOT

if TYPE_CHECKING:
    import pytest

    from tests.mutants.catalogue import Mutant

#: What pytest ends with.
_PASSED, _FAILED = 0, 1
#: The longest that tests may take without a mutant.
_PATIENCE_S = 900


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
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
    spec = find_spec("celery_idempotent")
    assert spec is not None, "celery-idempotent is not installed: make pytest"
    assert spec.origin is not None
    return Path(spec.origin).parent


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
    """Run pytest on the package in a directory, in a fork of this process."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _in_child(directory, arguments)
        except BaseException:  # noqa: BLE001  this process ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(code)
    ended_with: int | None = None
    while time.monotonic() < begun + timeout_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            ended_with = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    told = [line.split(" ", 1) for line in _read(directory / "told").splitlines()]
    if ended_with is not None:
        ended_with = next((int(code) for word, code in told if word == "ended"), ended_with)
    return _Run(
        code=ended_with,
        failed=tuple(dict.fromkeys(test for word, test in told if word == "failed")),
        passed=sum(word == "passed" for word, _ in told),
        seconds=time.monotonic() - begun,
        log=_read(directory / "log"),
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _in_child(directory: Path, arguments: Sequence[str]) -> int:
    import pytest

    os.setsid()
    os.environ["PYTHONPATH"] = str(directory)
    os.environ.pop("CI", None)
    sys.path.insert(0, str(directory))
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    rest = ("--import-mode=importlib", "-p", "no:valkey", "-p", "no:django")
    with (directory / "told").open("w") as told:
        code = pytest.main(
            [*options, *rest, f"--basetemp={directory / 'tmp'}", *arguments], [_Teller(told)]
        )
    used = sys.modules.get("celery_idempotent")
    if used is not None and Path(str(used.__file__)).parent.parent != directory:
        raise RuntimeError(f"the tests ran on {used.__file__}, not on the copy")
    return int(code)


class _Teller:
    """Writes what became of each test, a line each, where the parent process reads it."""

    def __init__(self, told: IO[str]) -> None:
        self._told = told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.passed and report.when == "call"):
            self._tell(f"{report.outcome} {report.nodeid}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # What goes wrong later, such as a connection that the garbage collector closes, is no answer of a test.
        self._tell(f"ended {int(exitstatus)}")

    def _tell(self, line: str) -> None:
        self._told.write(f"{line}\n")
        self._told.flush()
