"""The tests of the matrix, for one broker: all cells play at once, on two workers; each has a test of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.delivery.app import ACKS, POLICIES
from tests.delivery.cells import Cell, Scenario
from tests.delivery.driving import Stage, drive
from tests.delivery.scenarios import HEALTHY, KILLED
from tests.delivery.watched import Site
from tests.support import sites

#: So many cells play on the healthy worker at a time: each takes three of its processes at the most.
_AT_ONCE = 8


def cells(*scenarios: Scenario) -> Callable[[Any], Any]:
    """Parametrize a test with all policies and both acks, for each scenario."""
    found = itertools.product(scenarios, POLICIES, ACKS)
    return pytest.mark.parametrize(
        ("scenario", "policy", "acks"),
        [pytest.param(s, p, a, id=f"{s.__name__}-{p}-{a}") for s, p, a in found],
    )


@dataclass
class Played:
    """The matrix when all its cells have played."""

    cells: dict[tuple[str, str, str], Cell]
    healthy: Site
    killed: Site


class Matrix:
    """Every policy, late and early acks, in every situation, on one broker."""

    broker: ClassVar[str]
    #: Settings of the worker that is killed, and what else it is made for.
    settings: ClassVar[dict[str, Any]] = {}
    more: ClassVar[list[Scenario]] = []

    @pytest.fixture(scope="class")
    @classmethod
    def played(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Played]:
        directory = tmp_path_factory.mktemp("gates")
        with contextlib.ExitStack() as stack:

            def open_site(**settings: Any) -> Site:
                site = stack.enter_context(
                    sites.share(Site, request, tmp_path_factory, cls.broker, **settings)
                )
                stack.enter_context(site.open(concurrency=16))
                return site

            healthy = open_site(longest_pause=0.5)
            killed = open_site(idempotency_lease=3, longest_pause=3, **cls.settings)
            if cls.settings:
                stack.enter_context(sites.restoring(killed))
            played = Played({}, healthy, killed)
            for site, scenarios in ((healthy, HEALTHY), (killed, [*KILLED, *cls.more])):
                for scenario, policy, acks in itertools.product(scenarios, POLICIES, ACKS):
                    cell = Cell(site, scenario, policy, acks, directory)
                    played.cells[scenario.__name__, policy, acks] = cell
            cls._drive(played)
            yield played

    @staticmethod
    def _drive(played: Played) -> None:
        healthy, others = (
            [each for each in played.cells.values() if each.site is site]
            for site in (played.healthy, played.killed)
        )
        doomed = [each for each in others if each.scenario in KILLED]

        def kill_when_prepared() -> None:
            site = played.killed
            prepared = all(each.error or each.name in site.prepared for each in doomed)
            if not site.killed and prepared and site.vulnerable():
                site.kill()

        drive(
            Stage(healthy, at_once=_AT_ONCE),
            Stage(others, at_once=99, between=kill_when_prepared),
        )

    @staticmethod
    def judge(played: Played, scenario: Scenario, policy: str, acks: str) -> None:
        """Raise what went wrong in a cell; look again at what it showed, now that all is over."""
        cell = played.cells[scenario.__name__, policy, acks]
        if cell.error is not None:
            raise cell.error
        try:
            cell.shown_still()
        except AssertionError as error:
            raise AssertionError(f"{error}; {cell.story()}") from error

    @cells(*HEALTHY)
    def test_a_duplicate_shows_what_is_documented(
        self, played: Played, scenario: Scenario, policy: str, acks: str
    ) -> None:
        self.judge(played, scenario, policy, acks)

    @cells(*KILLED)
    def test_a_duplicate_on_a_killed_worker_shows_what_is_documented(
        self, played: Played, scenario: Scenario, policy: str, acks: str
    ) -> None:
        self.judge(played, scenario, policy, acks)

    def test_nothing_ever_succeeded_with_none(self, played: Played) -> None:
        for site in (played.healthy, played.killed):
            events = site.onlooker.all("task-succeeded")
            assert len(events) >= 16
            assert [each for each in events if each["result"] in ("None", None, "")] == []

    def test_no_message_is_left_over(self, played: Played) -> None:
        assert [site.left_over() for site in (played.healthy, played.killed)] == [0, 0]
