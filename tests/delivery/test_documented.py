"""What Celery's user guide says of calling, tasks and canvas is the same with our class as with Celery's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.delivery import (
    calling,
    calling_options,
    canvas,
    canvas_more,
    classes,
    options,
    retrying,
)
from tests.delivery.announced import announced
from tests.delivery.comparison import differences
from tests.delivery.scenario import Scenario, scenarios

pytestmark = [
    pytest.mark.worker,
    pytest.mark.redis,
]

CALLING = [*scenarios(calling), *scenarios(calling_options)]
TASKS = [*scenarios(retrying), *scenarios(options), *scenarios(classes)]
CANVAS = [*scenarios(canvas), *scenarios(canvas_more)]


def each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=str)


def compare(theatre: Any, scenario: Scenario) -> None:
    plain, ours = theatre.both(scenario)
    # Events and lines of a log may be on their way still; what should not be there was waited for.
    until = time.monotonic() + 5
    while (found := differences(plain, ours)) and not scenario.differs:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    shown = [line[:4000] for line in found[:20]]
    if scenario.differs:
        assert shown, f"no difference is left of {scenario.differs}"
        assert {*scenario.differs} <= announced().keys()
    else:
        assert not shown, "\n".join(shown)


@each(CALLING)
def test_calling(theatre, scenario):
    compare(theatre, scenario)


@each(TASKS)
def test_tasks(theatre, scenario):
    compare(theatre, scenario)


@each(CANVAS)
def test_canvas(theatre, scenario):
    compare(theatre, scenario)
