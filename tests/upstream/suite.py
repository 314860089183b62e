"""Celery's own test suites, run twice, with ``celery.Task`` and with ours, and compared test by test."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "INTEGRATION",
    "QUICK",
    "Comparison",
    "Difference",
    "Known",
    "NotPossible",
    "Outcome",
    "Run",
    "celery_version",
    "compare",
    "known_differences",
    "sdist",
]

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended, and the first words of what it said."""

    outcome: str
    said: str = ""
    reruns: int = 0

    def __str__(self) -> str:
        return self.outcome


@dataclass(slots=True)
class Run:
    """One run of a suite with one class."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    #: What our class did, and in how many tests it did anything.
    counts: Counter[str] = field(default_factory=Counter)
    ours: int = 0
    #: How many records there were in a Redis store at the end.
    records: int | None = None

    def totals(self) -> Counter[str]:
        return Counter(each.outcome for each in self.outcomes.values())

    @classmethod
    def read(cls, report: Path) -> Run:
        run = cls()
        with report.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if "records" in line:
                    run.records = line["records"]
                else:
                    run._add(line)
        return run

    def _add(self, line: Mapping[str, object]) -> None:
        name, outcome, said = (str(line[key]) for key in ("id", "outcome", "said"))
        before = self.outcomes.get(name)
        reruns = before.reruns if before else 0
        if outcome == "rerun":
            self.outcomes[name] = Outcome("passed", said, reruns + 1)
            return
        if outcome == "failed" and line["when"] != "call":
            outcome = "error"
        if before is None or _WORST.index(outcome) > _WORST.index(before.outcome):
            self.outcomes[name] = Outcome(outcome, said, reruns)
        counts = line.get("counts")
        if isinstance(counts, dict):
            self.counts.update(counts)
            self.ours += 1


#: What to end if this process is interrupted.
_running: set[subprocess.Popen[bytes]] = set()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    task_class: str,
    archive: Path,
    selection: Sequence[str],
    *,
    store: str = "memory://",
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
            "UPSTREAM_STORE": store,
            "UPSTREAM_REPORT": str(report),
            "UPSTREAM_WAITS": "\n".join(
                each.test for each in known_differences().values() if each.waits
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


@dataclass(frozen=True, slots=True)
class Known:
    """A difference that is there and has a reason.

    ``early``: it is gone with Celery's own defaults for acks; ``waits``: our class waits until the test is stopped.
    """

    test: str
    early: bool
    waits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A test that ended in one way with ``celery.Task`` and in another with ours; ``None``: it was not there."""

    test: str
    celery: Outcome | None
    ours: Outcome | None

    def __str__(self) -> str:
        said = next((each.said for each in (self.ours, self.celery) if each and each.said), "")
        return f"{self.test}: {self.celery} -> {self.ours}" + (f": {said}" if said else "")


@dataclass(slots=True)
class Comparison:
    """What came of it."""

    celery: Run
    ours: Run
    #: Not listed: each is a fault, of the library or of the list.
    unknown: list[Difference] = field(default_factory=list)
    #: Listed, with its reason.
    known: list[tuple[Difference, Known]] = field(default_factory=list)
    #: Different at first, and not when it was run again.
    unsteady: list[Difference] = field(default_factory=list)
    #: Listed, run, and not different.
    stale: list[Known] = field(default_factory=list)
    #: Listed as an effect of the defaults for acks, and different without it, too.
    unproven: list[Difference] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.unknown or self.stale or self.unproven)


def known_differences(
    path: Path = HERE / "known_differences.txt", *, broker: str | None = None
) -> dict[str, Known]:
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
        if tags <= {"acks", "waits", broker}:
            known[test] = Known(test, "acks" in tags, "waits" in tags, found[2])
    return known


def compare(
    selection: Sequence[str],
    known: Mapping[str, Known],
    *,
    servers: Iterable[Mapping[str, str]] | None = None,
    keep: Path | None = None,
    timeout: float = 3600,
) -> Comparison:
    """Run ``selection`` both ways, and again what differs without being listed.

    ``servers``: for the integration tests, one environment for each side (see :mod:`.integration`).

    Raises:
        NotPossible: if the comparison cannot be made here.
    """
    archive = sdist()
    environments = list(servers or ({}, {}))
    stores = [env.get("UPSTREAM_STORE", "memory://") for env in environments]

    def both(tests: Sequence[str], second: str = "idempotent") -> tuple[Run, Run]:
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(
                    run,
                    task_class,
                    archive,
                    tests,
                    store=store,
                    env=env,
                    keep=keep if tests is selection else None,
                    timeout=timeout,
                )
                for task_class, env, store in zip(
                    ("celery", second), environments, stores, strict=True
                )
            ]
            try:
                first, ours = (each.result() for each in runs)
            except BaseException:
                for process in tuple(_running):
                    _end(process)
                raise
        return first, ours

    result = Comparison(*both(selection))
    unlisted = []
    met = set()
    for difference in differences(result.celery, result.ours):
        listed = _listed(difference.test, known)
        if listed is None:
            unlisted.append(difference)
        else:
            met.add(listed.test)
            result.known.append((difference, listed))
    ran = {
        entry
        for test, outcome in result.celery.outcomes.items()
        if outcome.outcome == "passed" and (entry := _entry(test, known))
    }
    if celery_version().startswith(DESCRIBED):
        result.stale = [known[entry] for entry in sorted(ran - met)]

    if unlisted:
        again = differences(*both(sorted({_again(each.test) for each in unlisted})))
        steady = {each.test for each in again}
        for difference in unlisted:
            (result.unknown if difference.test in steady else result.unsteady).append(difference)

    provable = sorted({_again(each.test) for each, listed in result.known if listed.early})
    if provable:
        concerned = {each.test for each, listed in result.known if listed.early}
        without = differences(*both(provable, "early"))
        result.unproven = [each for each in without if each.test in concerned]
    return result


def differences(celery: Run, ours: Run) -> list[Difference]:
    """Return the tests that ended in different ways."""
    found = []
    for test in sorted(celery.outcomes.keys() | ours.outcomes.keys()):
        before, after = celery.outcomes.get(test), ours.outcomes.get(test)
        if before is None or after is None or before.outcome != after.outcome:
            found.append(Difference(test, before, after))
    return found


def _file(test: str) -> str:
    return test.partition("::")[0]


def _again(test: str) -> str:
    """Return what to run again: a whole file of quick tests, since what one leaves for the next is part of it."""
    return test if test.startswith("t/integration/") else _file(test)


def _entry(test: str, known: Mapping[str, Known]) -> str | None:
    for name in (test, test.partition("[")[0], _file(test)):
        if name in known:
            return name
    return None


def _listed(test: str, known: Mapping[str, Known]) -> Known | None:
    entry = _entry(test, known)
    return None if entry is None else known[entry]


# -- what people read -------------------------------------------------------------------------------


def table(result: Comparison) -> Iterator[str]:
    """Yield the lines of the report."""
    before, after = result.celery.totals(), result.ours.totals()
    yield f"{'Celery ' + celery_version():<20}{'celery.Task':>14}{'IdempotentTask':>16}"
    for outcome in reversed(_WORST):
        if before[outcome] or after[outcome]:
            yield f"{outcome:<20}{before[outcome]:>14}{after[outcome]:>16}"
    reruns = [
        sum(o.reruns for o in each.outcomes.values()) for each in (result.celery, result.ours)
    ]
    if any(reruns):
        yield f"{'attempts repeated':<20}{reruns[0]:>14}{reruns[1]:>16}"
    if result.ours.ours:
        did = ", ".join(f"{count} {name}" for name, count in sorted(result.ours.counts.items()))
        yield f"In this process IdempotentTask was at work in {result.ours.ours} tests: {did}."
    if result.ours.records is not None:
        yield f"The workers' IdempotentTask left {result.ours.records} records in the store."
    for title, lines in (
        ("DIFFERENT, and not listed", [str(each) for each in result.unknown]),
        ("listed, and NOT DIFFERENT", [each.test for each in result.stale]),
        (
            "listed as [acks], and DIFFERENT without these defaults, too",
            [str(each) for each in result.unproven],
        ),
        ("different at first, and not when run again", [str(each) for each in result.unsteady]),
        (
            "different, and listed",
            [f"{each.test}: {known.reason}" for each, known in result.known],
        ),
    ):
        if lines:
            yield f"\n{title}: {len(lines)}"
            yield from (f"  {line}" for line in lines)
    yield "\n" + ("The same." if result.agrees else "NOT the same.")
