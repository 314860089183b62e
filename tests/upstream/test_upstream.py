"""The part of Celery's own tests that is about tasks, with every task on ``IdempotentTask``."""

from __future__ import annotations

import pytest

from tests.support.servers import need
from tests.upstream.servers import servers
from tests.upstream.suite import (
    DESCRIBED,
    NotPossible,
    celery_version,
    compare,
    known_differences,
    sdist,
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

#: With a real worker. CONTRIBUTING.md says how all of it is run.
INTEGRATION_PART = (
    "t/integration/test_tasks.py",
    "t/integration/test_group_chains.py",
    "t/integration/test_redis_backend.py",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(
        not celery_version().startswith(f"{DESCRIBED}."),
        reason=f"known_differences.txt speaks of Celery {DESCRIBED}",
    ),
]


@pytest.fixture(autouse=True)
def _source():
    try:
        sdist()
    except NotPossible as error:
        need(False, f"Celery's own test suite ({error})")


@pytest.mark.timeout(600)
def test_celerys_own_tests_of_tasks_end_as_with_its_own_class():
    result = compare(PART, known_differences())
    report = str(result)
    assert result.agrees, report
    # The comparison is worth something only if the tests were there, and the tasks on our class.
    assert list(result.celery.outcomes.values()).count("passed") > 700, report
    assert result.ours.ours > 100, report
    assert result.ours.counts["claimed"] > 200, report


@pytest.mark.timeout(1200)
@pytest.mark.worker
@pytest.mark.parametrize("apart", [False, True], ids=["stored by the settle", "stored apart"])
def test_celerys_own_tests_with_a_worker_end_as_with_its_own_class(apart):
    with servers("redis", apart=apart) as environments:
        known = known_differences(broker="redis")
        result = compare(INTEGRATION_PART, known, servers=environments)
    report = str(result)
    assert result.agrees, report
    assert list(result.celery.outcomes.values()).count("passed") > 60, report
    assert result.ours.records > 100, report
