"""Two workers, one with Celery's class and one with ours, and every scenario played on both before it is compared."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pytest

from tests.delivery.recorder import unwatch, watch
from tests.delivery.scenario import Scenario
from tests.delivery.sides import Side, Stage
from tests.support.servers import embedded_redis

#: So many scenarios are under way at once; most of the time they wait.
_THREADS = 6

Plays = dict[tuple[str, bool], "Future[Stage]"]


@dataclass
class Theatre:
    """Both sides, and what is or will be known of each scenario."""

    plain: Side
    ours: Side
    plays: Plays

    def both(self, scenario: Scenario) -> tuple[Stage, Stage]:
        """Return the stages of a scenario once it was played on both sides."""
        if scenario.alone:
            wait(self.plays.values())
            return self._play(self.plain, scenario), self._play(self.ours, scenario)
        plain, ours = (self.plays[scenario.sentence, mine] for mine in (False, True))
        return plain.result(timeout=100), ours.result(timeout=100)

    @staticmethod
    def _play(side: Side, scenario: Scenario) -> Stage:
        return side.play(scenario.sentence, scenario.play, scenario.absent)


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    directory = tmp_path_factory.mktemp("documented")
    with embedded_redis() as server:
        made = []
        for number, ours in enumerate((False, True)):
            conf = {
                "broker_url": server.url(2 * number),
                "result_backend": server.url(2 * number + 1),
                **_CONF,
            }
            name = f"{'ours' if ours else 'plain'}-{uuid.uuid4().hex[:6]}"
            made.append(Side(name, ours=ours, directory=directory, conf=conf, mortal=True))
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(Side.start, made))
            yield made[0], made[1]
        finally:
            for side in made:
                side.close()


_CONF: dict[str, Any] = {
    "accept_content": ["json", "pickle", "yaml", "msgpack"],
    "result_accept_content": ["json"],
    "broker_connection_retry_on_startup": True,
    "result_extended": True,
    "task_send_sent_event": True,
    "worker_prefetch_multiplier": 8,
}


@pytest.fixture(scope="session")
def theatre(request: pytest.FixtureRequest, sides: tuple[Side, Side]) -> Iterator[Theatre]:
    """Every scenario of this session is under way from now on, those that take long first."""
    wanted: list[Scenario] = []
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(params.get("scenario"), Scenario):
            wanted.append(params["scenario"])
    wanted.sort(key=lambda each: not each.slow)
    watch()
    with ThreadPoolExecutor(_THREADS) as pool:
        plays: Plays = {
            (each.sentence, side.ours): pool.submit(
                side.play, each.sentence, each.play, each.absent
            )
            for each in wanted
            if not each.alone
            for side in sides
        }
        yield Theatre(*sides, plays)
        pool.shutdown(cancel_futures=True)
    unwatch()
