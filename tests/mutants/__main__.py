"""Is every mutant noticed? ``python -m tests.mutants [ids or groups] [--jobs n] [--list] [--tests path ...]``.

``--quick celery/checks.py`` tries one mutant of that file by one of its tests, within a minute. ``--tests-of FILES``
prints the tests without a worker that notice mutants of these files, which is what `make quick` runs.

Each mutant is a real bug, put into a copy of the installed package; the tests that it names are run on the copy, and
have to fail. The same tests run once without a mutant first: one that fails then proves nothing and is left out.
Ends with 0 if every mutant is noticed, with 1 if one survives, and with 2 if one could not be tried, because its text
is not in the code (``MISFIT``) or its tests could not be run (``BROKEN``).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from multiprocessing.pool import ThreadPool
from operator import itemgetter
from pathlib import Path

from tests.mutants.catalogue import Mutant, mutants
from tests.mutants.running import Baseline, Verdict, fits, installed_package, measure, try_out

#: The tests wait for workers most of the time, and leave the machine to others.
_NICE = 10
#: The folders of tests without a worker, the quickest first.
_QUICK = ("unit", "stores", "http", "admin", "cli", "sql")

#: Quick tests of files whose readers are elsewhere, beside those that notice their mutants.
_ALSO = {
    "protocol/options.py": (
        "tests/docs/test_docs.py::test_a_paragraph_says_where_the_option_goes_and_what_it_is_without",
        "tests/docs/test_docs.py::test_the_page_of_options_lists_every_option_and_nothing_else",
        "tests/docs/test_docs.py::test_the_page_of_options_tells_the_defaults_that_the_code_has",
        "tests/unit/test_policy.py",
    ),
    "records.py": ("tests/stores/test_memory.py", "tests/stores/test_redis.py"),
    "stores/table.py": ("tests/stores/test_memory.py", "tests/stores/test_redis.py"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("wanted", nargs="*", help="ids, or groups: core, http, redis, sql")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (2)")
    parser.add_argument(
        "--tests", nargs="+", help="run these rather than those that a mutant names"
    )
    parser.add_argument("--quick", metavar="file", help="one mutant of this file, by one test")
    parser.add_argument("--tests-of", nargs="*", metavar="file", help="print tests, and end")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    given = parser.parse_args()
    found = [m for m in mutants() if not given.wanted or {m.id, m.group} & set(given.wanted)]
    if unknown := set(given.wanted) - {word for m in found for word in (m.id, m.group)}:
        parser.error(f"no mutant and no group: {', '.join(sorted(unknown))}")
    if given.tests_of is not None:
        say("\n".join(sorted(tests_of(given.tests_of, found))))
        return 0
    if given.quick:
        name = given.quick.removeprefix("celery_idempotent/")
        tries = [(_cost(tests), m, tests) for m in found if m.file == name for tests in m.killers]
        if not tries:
            parser.error(f"no mutant of {given.quick}: add one to tests/mutants/*.yaml")
        _, cheapest, tests = min(tries, key=itemgetter(0))
        found, given.tests = [cheapest], given.tests or [tests]
    if given.list:
        for each in found:
            say(f"{each.group:6} {each.id:24} {each.bug}")
        return 0
    os.nice(max(_NICE - os.nice(0), 0))
    say(f"{len(found)} mutants, each in a copy of {installed_package()}")
    for each in found:
        if not fits(each):
            say(f"MISFIT   {each.id}: its text is not in {each.file}, or is there twice")
    return run(found, tuple(given.tests or ()), given.jobs)


def tests_of(changed: list[str], found: list[Mutant]) -> set[str]:
    """Return quick tests of changed files: those that notice their mutants, changed tests, readers, pages."""
    names = {each.removeprefix("celery_idempotent/") for each in changed}
    killers = {tests for each in found if each.file in names for tests in each.killers}
    files = {tests.partition("::")[0] for tests in killers if _cost(tests)[0] < len(_QUICK)}
    files |= {each for name in names for each in _ALSO.get(name, ())}
    files |= {each for each in changed if re.match(r"tests/.*/test_\w+\.py$", each)}
    if any(each.endswith(".md") for each in changed):
        files |= {f"tests/docs/test_{name}.py" for name in ("docs", "generated", "plain_words")}
    return {each for each in files if Path(each.partition("::")[0]).exists()}


def run(found: list[Mutant], instead: tuple[str, ...], jobs: int) -> int:
    """Measure the tests without a mutant, then try each mutant; return what the process ends with."""
    tests = {each.id: instead or each.killers for each in found}
    counts: Counter[str] = Counter()
    with ThreadPool(jobs) as pool:
        baselines: dict[str, Baseline] = {}
        wanted = sorted({name for names in tests.values() for name in names})
        for baseline in pool.imap_unordered(measure, wanted):
            baselines[baseline.tests] = baseline
            say(f"without  {baseline.seconds:5.0f} s  {baseline.passed:4} passed  {baseline.tests}")
            for test in baseline.failed:
                say(f"FAILS WITHOUT A MUTANT, so it proves nothing: {test}")
            if baseline.useless:
                say(f"SHOWS NOTHING: {baseline.tests}: {baseline.useless}")
        tries = [(each, [baselines[name] for name in tests[each.id]]) for each in found]
        for mutant, verdict in pool.imap_unordered(_try_out, tries):
            counts[verdict.word] += 1
            line = f"{verdict.word:8} {verdict.seconds:5.0f} s  {mutant.group:6} {mutant.id:24}"
            say(f"{line} {verdict.by or mutant.bug}")
    say(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    if counts["MISFIT"] or counts["BROKEN"]:
        return 2
    return int(counts["SURVIVED"] > 0)


def _cost(tests: str) -> tuple[int, bool]:
    """Guess which tests are the quickest: those without a server, without a worker, one test of a file."""
    folder = tests.split("/")[1]
    return (_QUICK.index(folder) if folder in _QUICK else len(_QUICK)), "::" not in tests


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _try_out(what: tuple[Mutant, list[Baseline]]) -> tuple[Mutant, Verdict]:
    mutant, baselines = what
    return mutant, try_out(mutant, baselines)


if __name__ == "__main__":
    sys.exit(main())
