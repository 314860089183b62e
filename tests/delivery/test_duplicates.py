"""Every policy, late and early acks, in every situation of ``duplicates.md``: all cells play at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.delivery.app import ACKS, POLICIES
from tests.delivery.cells import Cell, Scenario
from tests.delivery.driving import Stage, drive
from tests.delivery.scenarios import HEALTHY, KILLED, SLOW
from tests.delivery.watched import Site
from tests.support import sites
from tests.support.sites import IMPATIENT, RABBITMQ, REDIS

pytestmark = [pytest.mark.worker, pytest.mark.timeout(400)]

#: So many cells play on the healthy worker at a time: each takes three of its processes at the most.
_AT_ONCE = 8


@dataclass
class Played:
    """The matrix on one broker when all its cells have played."""

    cells: dict[tuple[str, str, str], Cell]
    healthy: Site
    killed: Site

    def drive(self) -> None:
        healthy, others = (
            [each for each in self.cells.values() if each.site is site]
            for site in (self.healthy, self.killed)
        )
        doomed = [each for each in others if each.scenario in KILLED]

        def kill_when_prepared() -> None:
            site = self.killed
            prepared = all(each.error or each.name in site.prepared for each in doomed)
            if not site.killed and prepared and site.vulnerable():
                site.kill()

        drive(
            Stage(healthy, at_once=_AT_ONCE),
            Stage(others, at_once=99, between=kill_when_prepared),
        )


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    """On Redis the killed worker has a visibility timeout that is shorter than some of its tasks."""
    broker, directory = request.param, tmp_path_factory.mktemp("gates")
    on_redis = broker == "redis"
    with contextlib.ExitStack() as stack:

        def open_site(**settings: object) -> Site:
            shared = sites.share(Site, request, tmp_path_factory, broker, **settings)
            site = stack.enter_context(shared)
            stack.enter_context(site.open(concurrency=16))
            return site

        healthy = open_site(longest_pause=0.5)
        impatient = {"broker_transport_options": IMPATIENT} if on_redis else {}
        killed = open_site(idempotency_lease=3, longest_pause=3, **impatient)
        if on_redis:
            stack.enter_context(sites.restoring(killed))
        played = Played({}, healthy, killed)
        for site, scenarios in ((healthy, HEALTHY), (killed, KILLED + (SLOW if on_redis else []))):
            for scenario, policy, acks in itertools.product(scenarios, POLICIES, ACKS):
                cell = Cell(site, scenario, policy, acks, directory)
                played.cells[scenario.__name__, policy, acks] = cell
        played.drive()
        yield played


ON_BOTH = pytest.mark.parametrize("played", [REDIS, RABBITMQ], indirect=True)


def cells(*scenarios: Scenario) -> pytest.MarkDecorator:
    found = itertools.product(scenarios, POLICIES, ACKS)
    ids = [pytest.param(s, p, a, id=f"{s.__name__}-{p}-{a}") for s, p, a in found]
    return pytest.mark.parametrize(("scenario", "policy", "acks"), ids)


@ON_BOTH
@cells(*HEALTHY, *KILLED)
def test_a_duplicate_shows_what_is_documented(
    played: Played, scenario: Scenario, policy: str, acks: str
) -> None:
    """What went wrong in a cell; and what it showed, looked at again now that all is over."""
    cell = played.cells[scenario.__name__, policy, acks]
    if cell.error is not None:
        raise cell.error
    try:
        cell.shown_still()
    except AssertionError as error:
        raise AssertionError(f"{error}; {cell.story()}") from error


@pytest.mark.parametrize("played", [REDIS], indirect=True)
@cells(*SLOW)
def test_copies_stay_bounded_under_a_short_visibility_timeout(
    played: Played, scenario: Scenario, policy: str, acks: str
) -> None:
    test_a_duplicate_shows_what_is_documented(played, scenario, policy, acks)


@ON_BOTH
def test_nothing_ever_succeeded_with_none_and_no_message_is_left_over(played: Played) -> None:
    for site in (played.healthy, played.killed):
        events = site.onlooker.all("task-succeeded")
        assert len(events) >= 16
        assert [each for each in events if each["result"] in ("None", None, "")] == []
        assert site.left_over() == 0
