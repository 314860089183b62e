"""The part of Celery's own tests that is about tasks and workers, with ``celery.Task`` and with ``IdempotentTask``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.servers import need

HERE = Path(__file__).resolve().parent
CACHE_VARIABLE = "CELERY_IDEMPOTENT_UPSTREAM_CACHE"
VERSION = importlib.metadata.version("celery")
#: The release that ``known_differences.txt`` speaks of: with another one, a difference that is not there is no news.
DESCRIBED = "5.7"

PART = (
    "t/unit/app/test_app.py",
    "t/unit/tasks/test_canvas.py",
    "t/unit/tasks/test_chord.py",
    "t/unit/tasks/test_context.py",
    "t/unit/tasks/test_tasks.py",
    "t/unit/tasks/test_trace.py",
    "t/unit/concurrency",
    "t/unit/worker",
)
#: What takes seconds, of the worker's side.
QUICK = (
    "t/unit/concurrency/test_prefork.py::test_process_initializer",
    "t/unit/worker/test_eta_query_task.py",
    "t/unit/worker/test_request.py",
    "t/unit/worker/test_strategy.py",
)
#: What Celery's tests use of pytest plugins; whichever is missing is missing on both sides.
PLUGINS = ("pytest_timeout", "pytest_click", "pytest_order", "pytest_rerunfailures")
#: The worst of what a test's setup, body and teardown came to is how it ended.
WORST = ("passed", "xfailed", "skipped", "xpassed", "error", "failed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VERSION.startswith(f"{DESCRIBED}."),
        reason=f"known_differences.txt speaks of Celery {DESCRIBED}",
    ),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Celery's tests alone, from its source distribution, fetched with pip once: Celery shall be the installed one."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    named = os.environ.get(CACHE_VARIABLE)
    cache = Path(named) if named else Path(base) / "celery-idempotent" / "upstream"
    archive = cache / f"celery-{VERSION}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as fresh:
            wanted = ["--no-deps", "--no-binary", "celery", "--dest", fresh, f"celery=={VERSION}"]
            pip = [sys.executable, "-m", "pip", "download", "--quiet", *wanted]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
            found = list(Path(fresh).glob("*.tar.gz"))
            need(found, f"the source of Celery {VERSION} ({done.stderr.strip()[-300:]})")
            found[0].replace(archive)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = Path(*Path(member.name).parts[1:])
            if (inside.parts[:1] == ("t",) or inside == Path("pyproject.toml")) and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                target = tmp_path / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return tmp_path


def known_differences() -> dict[str, tuple[bool, str]]:
    """By test: whether it waits with our class until it is stopped, and the reason why it ends otherwise."""
    known = {}
    for line in (HERE / "known_differences.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            found = re.fullmatch(r"(\S+)  (\[waits\] )?(\S.*)", line)
            assert found, f"without a reason: {line}"
            known[found[1]] = bool(found[2]), found[3]
    return known


@dataclass
class Run:
    """A run with one class: how each test ended, the first words of what it said, and what our class did."""

    outcomes: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def run(task_class: str, tree: Path, tests: Sequence[str]) -> Run:
    """Run tests in a process of their own."""
    report, log = tree / f"{task_class}.jsonl", tree / f"{task_class}.log"
    plugins = [name for name in PLUGINS if importlib.util.find_spec(name)]
    options = ["--quiet", "--tb=short", "--continue-on-collection-errors"]
    options += ["--timeout=120"] if "pytest_timeout" in plugins else []
    for plugin in ("no:cacheprovider", "celery.contrib.pytest", "tests.upstream.plugin", *plugins):
        options += ["-p", plugin]
    ours = ("CELERY_", "DJANGO_", "PYTEST_", "TEST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
        # Some tests start the command `celery`.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "UPSTREAM_TASK_CLASS": task_class,
        "UPSTREAM_REPORT": str(report),
        "UPSTREAM_WAITS": "\n".join(name for name, (w, _) in known_differences().items() if w),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "inner.py"), *options, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = process.wait(500)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what some tests leave behind
            process.wait()
    # 1: some tests failed, as some do everywhere.
    assert ended in (0, 1), log.read_text(errors="replace")[-3000:]
    found = Run()
    for line in map(json.loads, report.read_text().splitlines()):
        name, outcome = line["id"], line["outcome"].replace("rerun", "passed")
        if outcome == "failed" and line["when"] != "call":
            outcome = "error"
        if WORST.index(outcome) >= WORST.index(found.outcomes.get(name, "passed")):
            found.outcomes[name], found.said[name] = outcome, line["said"]
        if "counts" in line:
            found.counts.update(line["counts"])
    return found


def compare(tree: Path, tests: Sequence[str]) -> tuple[Run, Run, dict[str, str]]:
    """Run tests both ways; return also those that ended in different ways, each with a line for people."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, kind, tree, tests) for kind in ("celery", "idempotent")]
        theirs, ours = (each.result() for each in runs)
    different = {}
    for test in sorted(theirs.outcomes.keys() | ours.outcomes.keys()):
        before, after = theirs.outcomes.get(test), ours.outcomes.get(test)
        if before != after:
            said = ours.said.get(test) or theirs.said.get(test, "")
            different[test] = f"{test}: {before} -> {after}: {said}"
    return theirs, ours, different


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("tests", "passing", "claims"),
    [(QUICK, 280, 10), pytest.param(PART, 1500, 200, marks=pytest.mark.wide)],
    ids=["quick", "all"],
)
def test_celerys_own_tests_of_tasks_end_as_with_its_own_class(
    tree: Path, tests: Sequence[str], passing: int, claims: int
) -> None:
    known = known_differences()
    theirs, ours, different = compare(tree, tests)

    def entries(tests: Iterable[str]) -> set[str]:
        """A name without ``[...]`` is listed for each of its parameters."""
        return {name for test in tests for name in (test, test.partition("[")[0]) if name in known}

    unlisted = {test for test in different if not entries([test])}
    if unlisted:  # once more: whole files, since what one test leaves for the next is part of it
        again = compare(tree, sorted({test.partition("::")[0] for test in unlisted}))[2]
        unlisted &= again.keys()
    assert not unlisted, "\n".join(different[test] for test in unlisted)
    passed = {test for test, outcome in theirs.outcomes.items() if outcome == "passed"}
    assert entries(passed) <= entries(different), "listed, and not different"
    # The comparison is worth something only if the tests were there, and the tasks on our class.
    assert len(passed) > passing
    assert ours.counts["claimed"] > claims
