"""Is every mutant noticed? ``python -m tests.mutants [ids or groups] [--jobs n] [--list] [--tests path ...]``.

Each mutant is a real bug, put into a copy of the installed package; the tests that it names are run on the copy, and
have to fail. The tests run in a fork of this process, which has imported what most of them need.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.mutants.catalogue import Mutant, mutants
from tests.support.paths import ROOT

#: Tests that take longer hang, which is noticed, too.
PATIENCE = 300
#: What pytest ends with.
_PASSED, _FAILED = 0, 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("wanted", nargs="*", help="ids, or groups: core, http, redis, sql")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (2)")
    parser.add_argument(
        "--tests", nargs="+", help="run these rather than those that a mutant names"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    given = parser.parse_args()
    found = [m for m in mutants() if not given.wanted or {m.id, m.group} & set(given.wanted)]
    if given.list:
        for each in found:
            say(f"{each.group:6} {each.id:24} {each.bug}")
        return 0
    for name in (
        "pytest",
        "_pytest.assertion.rewrite",
        "celery.app.task",
        "kombu",
        "redis",
    ):
        __import__(name)
    counts: Counter[str] = Counter()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        runs = {pool.submit(notice, each, given.tests or each.killers): each for each in found}
        for run in concurrent.futures.as_completed(runs):
            each, (word, seconds) = runs[run], run.result()
            counts[word] += 1
            say(f"{word:8} {seconds:5.0f} s  {each.group:6} {each.id:24} {each.bug}")
    say(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["killed"] < len(found))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def notice(mutant: Mutant, tests: tuple[str, ...]) -> tuple[str, float]:
    """Say whether the tests notice a mutant: ``killed``, ``SURVIVED``, or ``BROKEN`` if they could not be run."""
    begun = time.monotonic()
    installed = installed_package()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        copy = Path(directory) / "celery_idempotent"
        shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / mutant.file
        text = target.read_text()
        if text.count(mutant.old) != 1:
            return "BROKEN", 0
        target.write_text(text.replace(mutant.old, mutant.new))
        # One after the other, so that the first, which mostly notices, need not wait for the rest.
        codes = []
        for test in tests:
            codes.append(_pytest(Path(directory), shlex.split(test)))
            if codes[-1] != _PASSED:
                break
        word = {_PASSED: "SURVIVED", _FAILED: "killed", None: "killed"}.get(codes[-1], "BROKEN")
        if word == "BROKEN":
            say((Path(directory) / "log").read_text(errors="replace")[-2000:])
    return word, time.monotonic() - begun


def installed_package() -> Path:
    """Return where the package under test is: not the source tree, which this process was started in."""
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
    spec = find_spec("celery_idempotent")
    assert spec is not None, "celery-idempotent is not installed: make pytest"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _pytest(directory: Path, tests: list[str]) -> int | None:
    """Run tests on the package in a directory; return pytest's exit code, ``None`` if it took too long."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _in_child(directory, tests)
        except BaseException:  # noqa: BLE001  this process ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _in_child(directory: Path, tests: list[str]) -> int:
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
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    rest = ("--import-mode=importlib", "-p", "no:valkey", "-p", "no:django")
    return int(pytest.main([*options, *rest, f"--basetemp={directory / 'tmp'}", *tests]))


if __name__ == "__main__":
    sys.exit(main())
