"""The part of Celery's own tests that is about tasks, with every task on ``IdempotentTask``."""

from __future__ import annotations

import pytest

from tests.support.servers import need
from tests.upstream.suite import (
    DESCRIBED,
    NotPossible,
    celery_version,
    compare,
    known_differences,
    sdist,
    table,
)

PART = (
    "t/unit/app/test_app.py",
    "t/unit/tasks/test_canvas.py",
    "t/unit/tasks/test_chord.py",
    "t/unit/tasks/test_context.py",
    "t/unit/tasks/test_tasks.py",
    "t/unit/tasks/test_trace.py",
    "t/unit/worker/test_request.py",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(
        not celery_version().startswith(f"{DESCRIBED}."),
        reason=f"known_differences.txt speaks of Celery {DESCRIBED}",
    ),
]


@pytest.mark.timeout(600)
def test_celerys_own_tests_of_tasks_end_as_with_its_own_class():
    try:
        sdist()
    except NotPossible as error:
        need(False, f"Celery's own test suite ({error})")
    result = compare(PART, known_differences())
    report = "\n".join(table(result))
    assert result.agrees, report
    # The comparison is worth something only if the tests were there, and the tasks on our class.
    assert result.celery.totals()["passed"] > 700, report
    assert result.ours.ours > 100, report
    assert result.ours.counts["claimed"] > 200, report
