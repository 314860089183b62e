"""Celery's own test suites, run twice, with ``celery.Task`` and with ours, and compared test by test."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent

CACHE_VARIABLE = "CELERY_IDEMPOTENT_UPSTREAM_CACHE"

#: The release that ``known_differences.txt`` speaks of: with another one, a difference that is not there is no news.
DESCRIBED = "5.7"

QUICK = ("t/unit",)
#: Left out, as they disturb those that follow, with either class: test_worker.py (a command that breaks the session's
#: worker), test_backend_leak_in_fixture_teardown.py (hangs), the tests of connections that fail, and of memory leaks.
INTEGRATION = tuple(
    f"t/integration/test_{name}.py"
    for name in (
        "inspect",
        "redis_backend",
        "group_chains",
        "cache_backend",
        "database_backend",
        "loader",
        "security",
        "serialization",
        "upgrade",
        "tasks",
        "canvas",
    )
)

#: Which class the tasks of a run get.
CLASSES = ("celery", "idempotent")

#: What Celery's tests use of pytest plugins; whichever is missing is missing on both sides.
_PLUGINS = (
    "pytest_timeout",
    "pytest_click",
    "pytest_order",
    "pytest_rerunfailures",
)

#: The worst of what a test's setup, body and teardown came to is how it ended.
_WORST = ("passed", "xfailed", "skipped", "xpassed", "error", "failed")


class NotPossible(Exception):
    """The comparison cannot be made here."""


# -- the suites -------------------------------------------------------------------------------------


def celery_version() -> str:
    return importlib.metadata.version("celery")


def sdist() -> Path:
    """Return the source distribution of the installed Celery, fetched with pip once.

    Raises:
        NotPossible: if pip cannot get it.
    """
    version = celery_version()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    named = os.environ.get(CACHE_VARIABLE)
    cache = Path(named) if named else Path(base) / "celery-idempotent" / "upstream"
    archive = cache / f"celery-{version}.tar.gz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as fresh:
        wanted = ["--no-deps", "--no-binary", "celery", "--dest", fresh, f"celery=={version}"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        try:
            done = subprocess.run(
                [*pip, *wanted], capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotPossible(f"pip did not get the sdist of Celery {version} in time") from None
        found = list(Path(fresh).glob("*.tar.gz"))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise NotPossible(f"pip cannot get the sdist of Celery {version}: {last}")
        found[0].replace(archive)
    return archive


def unpack(archive: Path, into: Path) -> None:
    """Unpack the tests alone: Celery itself shall be the installed one."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = Path(*Path(member.name).parts[1:])
            if (inside.parts[:1] == ("t",) or inside == Path("pyproject.toml")) and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                target = into / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    if not (into / "t").is_dir():
        raise NotPossible("the sdist has no t/")


# -- one run ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One run of a suite with one class: how each test ended, and the first words of what it said."""

    outcomes: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    #: What our class did, and in how many tests it did anything.
    counts: Counter[str] = field(default_factory=Counter)
    ours: int = 0
    #: How many records there were in a Redis store at the end.
    records: int | None = None

    @classmethod
    def read(cls, report: Path) -> Run:
        run = cls()
        for line in map(json.loads, report.read_text(encoding="utf-8").splitlines()):
            if "records" in line:
                run.records = line["records"]
                continue
            name, outcome = line["id"], line["outcome"].replace("rerun", "passed")
            if outcome == "failed" and line["when"] != "call":
                outcome = "error"
            if _WORST.index(outcome) >= _WORST.index(run.outcomes.get(name, "passed")):
                run.outcomes[name], run.said[name] = outcome, line["said"]
            if "counts" in line:
                run.counts.update(line["counts"])
                run.ours += 1
        return run


#: What to end if this process is interrupted.
_running: set[subprocess.Popen[bytes]] = set()


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    task_class: str,
    archive: Path,
    selection: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    keep: Path | None = None,
    timeout: float = 3600,
) -> Run:
    """Run the tests of ``selection`` in a tree of their own.

    Raises:
        NotPossible: if pytest did not come to its end.
    """
    with tempfile.TemporaryDirectory(prefix="upstream-") as directory:
        tree = Path(directory) / "celery"
        unpack(archive, tree)
        report = Path(directory) / "report.jsonl"
        log = (keep or Path(directory)) / f"{task_class}.log"
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CELERY_", "DJANGO_", "PYTEST_", "TEST_"))
        }
        # Some tests start the command `celery`.
        path = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        environment |= {
            "PATH": os.pathsep.join(path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "UPSTREAM_TASK_CLASS": task_class,
            "UPSTREAM_STORE": "memory://",
            "UPSTREAM_REPORT": str(report),
            "UPSTREAM_WAITS": "\n".join(
                test for test, (tags, _) in known_differences().items() if "waits" in tags
            ),
            **(env or {}),
        }
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "inner.py"), *_options(), *selection],
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running.add(process)
            try:
                ended = process.wait(timeout)
            except subprocess.TimeoutExpired:
                ended = None
            finally:
                _end(process)  # and the pool processes that some tests leave behind
                process.wait()
                _running.discard(process)
        # 1: some tests failed, as some do everywhere.
        if ended not in (0, 1):
            how = "took too long" if ended is None else f"ended with {ended}"
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise NotPossible(f"pytest with {task_class} {how}:\n{tail}")
        return Run.read(report)


@functools.cache
def _options() -> tuple[str, ...]:
    plugins = [name for name in _PLUGINS if importlib.util.find_spec(name)]
    options = ["--quiet", "--tb=short", "--continue-on-collection-errors", "--timeout=120"]
    if "pytest_timeout" not in plugins:
        options.pop()
    for plugin in ("no:cacheprovider", "celery.contrib.pytest", "tests.upstream.plugin", *plugins):
        options += ["-p", plugin]
    return tuple(options)


# -- both -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Comparison:
    """Both runs, and what came of it: tests that ended in two ways, each as a line for people."""

    celery: Run
    ours: Run
    #: Not listed: each is a fault, of the library or of the list.
    unknown: list[str] = field(default_factory=list)
    #: Listed, with its reason.
    known: list[str] = field(default_factory=list)
    #: Different at first, and not when it was run again.
    unsteady: list[str] = field(default_factory=list)
    #: Listed, run, and not different.
    stale: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.unknown or self.stale)

    def differences(self) -> dict[str, str]:
        """Return the tests that ended in different ways; ``None``: it was not there."""
        found = {}
        for test in sorted(self.celery.outcomes.keys() | self.ours.outcomes.keys()):
            before, after = self.celery.outcomes.get(test), self.ours.outcomes.get(test)
            if before != after:
                said = self.ours.said.get(test) or self.celery.said.get(test, "")
                found[test] = f"{test}: {before} -> {after}: {said}"
        return found

    def __str__(self) -> str:
        before, after = Counter(self.celery.outcomes.values()), Counter(self.ours.outcomes.values())
        lines = [f"{'Celery ' + celery_version():<20}{'celery.Task':>14}{'IdempotentTask':>16}"]
        lines += [
            f"{outcome:<20}{before[outcome]:>14}{after[outcome]:>16}"
            for outcome in sorted(before | after, key=_WORST.index, reverse=True)
        ]
        did = ", ".join(f"{count} {name}" for name, count in sorted(self.ours.counts.items()))
        lines.append(f"IdempotentTask was at work in {self.ours.ours} tests: {did}.")
        lines.append(f"The workers' IdempotentTask left {self.ours.records} records in the store.")
        for title, found in (
            ("DIFFERENT, and not listed", self.unknown),
            ("listed, and NOT DIFFERENT", self.stale),
            ("different at first, and not when run again", self.unsteady),
            ("different, and listed", self.known),
        ):
            if found:
                lines += [f"\n{title}: {len(found)}", *(f"  {line}" for line in found)]
        return "\n".join([*lines, "\nThe same." if self.agrees else "\nNOT the same."])


def known_differences(
    path: Path = HERE / "known_differences.txt", *, broker: str | None = None
) -> dict[str, tuple[set[str], str]]:
    """Read the list: a test's id, two spaces or more, ``[tags]``, the reason; the file says what the tags mean.

    An id without ``[...]`` stands for each of its parameters, and one without ``::`` for each test of that file.
    """
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        test, _, rest = line.partition("  ")
        found = re.fullmatch(r"((?:\[\w+\] *)*)(\S.*)", rest.strip())
        assert found, f"{test} is listed without a reason"
        tags = set(re.findall(r"\w+", found[1]))
        if tags <= {"waits", broker}:
            known[test] = tags, found[2]
    return known


def compare(
    selection: Sequence[str],
    known: Mapping[str, tuple[set[str], str]],
    *,
    servers: Sequence[Mapping[str, str]] = ({}, {}),
    keep: Path | None = None,
) -> Comparison:
    """Run ``selection`` both ways, and again what differs without being listed.

    ``servers``: for the integration tests, one environment for each side (see :mod:`.servers`).

    Raises:
        NotPossible: if the comparison cannot be made here.
    """
    archive = sdist()

    def both(tests: Sequence[str]) -> Comparison:
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(run, kind, archive, tests, env=env, keep=keep)
                for kind, env in zip(CLASSES, servers, strict=True)
            ]
            try:
                celery, ours = (each.result() for each in runs)
            except BaseException:
                for process in tuple(_running):
                    _end(process)
                raise
        return Comparison(celery, ours)

    result = both(selection)
    different = result.differences()
    result.known = [
        f"{line}: {known[e][1]}" for t, line in different.items() if (e := _entry(t, known))
    ]
    if celery_version().startswith(DESCRIBED):
        passed = {test for test, outcome in result.celery.outcomes.items() if outcome == "passed"}
        result.stale = sorted(
            {e for t in passed if (e := _entry(t, known))} - {_entry(t, known) for t in different}
        )
    if unlisted := {t: line for t, line in different.items() if not _entry(t, known)}:
        again = both(sorted({_again(test) for test in unlisted})).differences()
        for test, line in unlisted.items():
            (result.unknown if test in again else result.unsteady).append(line)
    return result


def _again(test: str) -> str:
    """Return what to run again: a whole file of quick tests, since what one leaves for the next is part of it."""
    return test if test.startswith("t/integration/") else test.partition("::")[0]


def _entry(test: str, known: Mapping[str, object]) -> str | None:
    names = (test, test.partition("[")[0], test.partition("::")[0])
    return next((name for name in names if name in known), None)
