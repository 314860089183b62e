"""A chain object that is applied twice runs twice, although Celery gives its last step one id."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.delivery.conftest import Site

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def add(shared: Site, key: str) -> Callable[..., Any]:
    """Return a signature of a task that adds two numbers, and notes them."""
    return partial(shared.app.tasks["adding"].s, key=key)


def noted(shared: Site, phase: str, key: str, count: int) -> list[str]:
    entries = partial(shared.ledger.entries, phase, key)
    wait_for(lambda: len(entries()) >= count, 20, lambda: str(entries()))
    return [each.task_id for each in entries()]


def test_every_step_of_every_application_runs(shared, key, add):
    pipeline = chain(add(1), add(2))
    for number in (0, 1):
        pipeline.apply_async((number,))
    assert sorted(noted(shared, "added", key, 4)) == ["0+1", "1+1", "1+2", "2+2"]


def test_a_retried_head_does_not_make_its_last_step_another(shared, key, add):
    result: Any = chain(add(0, 1, retry=True), add(2), add(3)).apply_async()
    assert result.get(timeout=20) == 6
    assert noted(shared, "added", key, 3) == ["0+1", "1+2", "3+3"]


def test_a_chord_at_the_end_runs_its_body_in_every_application(shared, key, add):
    total = shared.app.tasks["total"].s(key=key)
    pipeline = chain(add(1), chord([add(10), add(20)], total, app=shared.app))
    pipeline.apply_async((0,))
    assert noted(shared, "total", key, 1) == ["32"]
    pipeline.apply_async((1,))
    assert noted(shared, "total", key, 2) == ["32", "34"]
