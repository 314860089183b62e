"""What Celery's user guide says is the same with our class as with Celery's, but for what differences.md announces.

Every scenario is played by two workers, one with Celery's class and one with ours, before the two are compared.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from celery import Celery, chain

from celery_idempotent import InvalidKey, InvalidOption
from tests.delivery.beside_tasks import OURS, PLAIN
from tests.delivery.comparison import differences
from tests.delivery.recorder import unwatch, watch
from tests.delivery.scenario import CELERY, Scenario, everything
from tests.delivery.sides import PATIENCE, Side, Stage
from tests.support.paths import ROOT
from tests.support.servers import embedded_redis
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

SCENARIOS = [each for each in everything() if each.since <= CELERY]

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


@pytest.fixture(scope="module")
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
            made.append(Side(name, ours=ours, directory=directory, conf=conf))
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


@pytest.fixture(scope="module")
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


def announced() -> dict[str, str]:
    """Return the text of each announced difference by its name, which is its heading's."""
    page = (ROOT / "docs" / "differences.md").read_text()
    parts = re.split(r"^## .*?`([a-z-]+)`.*$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_what_the_guide_says_is_so(theatre: Theatre, scenario: Scenario) -> None:
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
        assert scenario.differs in announced()
    else:
        assert not shown, "\n".join(shown)


Check = Callable[[Side], bool]


def has_own_headers(side: Side) -> bool:
    show = side.app.tasks["tests.show"]
    result: Any = chain(show.si(), show.si()).apply_async()
    result.get(timeout=PATIENCE)
    (line,) = [x for x in lines(side, result.id) if x["kind"] == "prerun"]
    return any(name.startswith("idempotency") for name in line["context"]["headers"] or {})


def logs_more(side: Side) -> bool:
    result = side.app.tasks["tests.works_early"].apply_async(("dies",), queue=side.mortal_queue)
    with pytest.raises(Exception, match="SIGKILL"):
        result.get(timeout=PATIENCE)
    if side.ours:
        wait_for(lambda: "its process" in side.mortal.log, PATIENCE, "the log")
    return "] idempotency: " in side.mortal.log


def shows_frames(side: Side) -> bool:
    result = side.app.tasks["tests.fail"].delay()
    result.get(timeout=PATIENCE, propagate=False)
    assert "tests/delivery/beside_tasks.py" in result.traceback
    return "/celery_idempotent/" in result.traceback


def calls_bases_for_runs_only(side: Side) -> bool:
    calling = side.app.tasks["tests.calling"]
    task_id = f"{side.name}.calling"
    for n in (1, 2):
        calling.apply_async((n,), task_id=task_id).get(timeout=PATIENCE)
        found = lines(side, task_id, ends=n)
    return [each["what"] for each in found if each["kind"] == "note"] == ["called"]


def sweeps(side: Side) -> bool:
    inspected = side.app.control.inspect([side.node], timeout=PATIENCE, limit=1).registered()
    registered = "celery_idempotent.sweep" in inspected[side.node]
    for interval in (30, None):
        app = make(side, idempotency_sweep_interval=interval)
        app.finalize()
        # A shared task of another test's may be one of ours: then Celery's app has the sweep as well.
        if side.ours:
            found = "celery_idempotent.sweep" in app.conf.beat_schedule
            assert found is (interval is not None)
        app.close()
    return registered


def binds(side: Side) -> bool:
    app = make(side)
    task: Any = app.task(name="by_number", shared=False, idempotency_key="x")(numbered)
    try:
        task.apply_async((1.5,), connection=side.app.connection_for_write(), retry=False)
    except InvalidKey:
        return True
    finally:
        app.close()
    return False


def sends_what_was_refused(side: Side) -> bool:
    """The broker takes nothing for the queue of the next step: its key is no list."""
    queue, show = f"{side.name}.refused", side.app.tasks["tests.show"]
    with redis.Redis.from_url(side.app.conf.broker_url) as broker:
        broker.set(queue, "no list")
        result: Any = chain(show.si(), show.si().set(queue=queue)).apply_async().parent
        told = "is done, its callbacks are not all sent yet"
        wait_for(lambda: result.ready() or told in side.worker.log, PATIENCE, "the refusal")
        broker.delete(queue)
        result.get(timeout=PATIENCE, propagate=False)
        sent = bool(broker.llen(queue))
        broker.delete(queue)
    assert result.state == ("SUCCESS" if sent else "FAILURE")
    return sent


def refuses_coroutines(side: Side) -> bool:
    app = make(side)
    app.finalize()
    try:
        app.task(name="awaited", shared=False)(awaited)
    except InvalidOption:
        return True
    finally:
        app.close()
    return False


async def awaited() -> None: ...


def numbered(x: float) -> float:
    return x


def make(side: Side, **conf: Any) -> Celery:
    app = Celery("made", task_cls=OURS if side.ours else PLAIN, set_as_current=False)
    conf = {"broker_url": side.app.conf.broker_url, "idempotency_store": "memory://", **conf}
    app.conf.update(task_default_queue=f"{side.name}.made", **conf)
    app.task(name="numbered", shared=False)(numbered)
    return app


def lines(side: Side, task_id: str, *, ends: int = 1) -> list[dict[str, Any]]:
    def ended() -> list[dict[str, Any]]:
        side.pump()
        found = list(side.lines[task_id])
        return found if [each["kind"] for each in found].count("postrun") == ends else []

    return wait_for(ended, PATIENCE, f"the end of {task_id}")


#: Those that the comparison does not see, with what shows them: not with Celery, but with ours.
UNSEEN: dict[str, Check] = {
    "own-headers": has_own_headers,
    "sending": sends_what_was_refused,
    "own-log-lines": logs_more,
    "frames-in-tracebacks": shows_frames,
    "calls-of-bases": calls_bases_for_runs_only,
    "unfinished-bodies": refuses_coroutines,
    "sweep-task": sweeps,
    "binding-of-arguments": binds,
}


@pytest.mark.parametrize("difference", UNSEEN)
def test_one_that_is_taken_out_of_the_comparison_is_there(sides, difference):
    plain, ours = sides
    assert UNSEEN[difference](ours)
    assert not UNSEEN[difference](plain)


def test_every_one_is_announced_and_every_announced_one_is_shown():
    shown = {each.differs for each in everything() if each.differs}
    assert announced().keys() == shown | UNSEEN.keys()


def test_each_says_why_and_how_to_get_celerys_behaviour():
    for name, text in announced().items():
        assert "*Why:*" in text, name
        assert "*Celery's behaviour:*" in text, name
