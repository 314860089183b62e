"""What is played: deliver, kill, wait until nothing moves any more, count."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from testproject.demo.broker import Broker
from testproject.demo.chaos import Killer, Target
from testproject.demo.events import Event
from testproject.demo.rehearsal import PLAN
from testproject.demo.report import Report, make_report
from testproject.demo.show import Show, show_on
from testproject.demo.stage import Stage
from testproject.demo.traffic import Traffic, plan_sends, plan_work
from testproject.webhooks import figures
from testproject.webhooks.models import Kind

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Play"]

_LOOK_S: Final = 0.1
_LOOKS_AT_REST: Final = 4
#: Deliver so many requests a second, but for at least so many seconds, if there are events enough.
_RATE: Final = 40.0
_AT_LEAST_S: Final = 9.0
_EVENT_S: Final = 0.25
#: After how much of the work a SIGKILL is sent, and to what.
_STRIKES: Final = (
    (0.15, Target.WORKER),
    (0.30, Target.PROCESS),
    (0.45, Target.WORKER),
    (0.65, Target.PROCESS),
    (0.80, Target.WORKER),
)
#: A strike for so many deliveries each, and no fewer than the first two.
_A_STRIKE_FOR: Final = 8
#: No good moment for a kill: try again after so much more of the work.
_LATER: Final = 0.03
#: Nothing runs, nothing waits, and something stays unacked: after so long, a restore is overdue.
_OVERDUE_S: Final = 6.0


class Play:
    """One performance, on a stage that is set."""

    def __init__(self, stage: Stage, events: Sequence[Event], *, seed: int, processes: int) -> None:
        self._stage = stage
        self._seed = seed
        self._processes = processes
        self._deliveries = {event.delivery_id for event in events}
        # A source of chance for each purpose: what one takes does not change what others get.
        work = plan_work(events, chance=random.Random(f"work {seed}"))
        (stage.directory / PLAN).write_text(json.dumps(work))
        self._sends = plan_sends(
            events,
            chance=random.Random(f"sends {seed}"),
            rate=_RATE,
            at_least_s=min(_AT_LEAST_S, _EVENT_S * len(events)),
        )
        self._traffic = Traffic(events, self._sends, secret=stage.secret)
        self._broker = Broker(stage.redis_url)
        self._killer = Killer(
            stage.worker,
            directory=stage.directory,
            broker=self._broker,
            chance=random.Random(f"kills {seed}"),
            anywhere=stage.scene.atomic,
        )
        self._strikes = deque(_STRIKES[: max(2, len(self._deliveries) // _A_STRIKE_FOR)])
        self._quiet_looks = 0
        self._quiet_since = time.monotonic()

    def run(self, console: Console, *, deadline: float) -> bool:
        """Deliver everything and wait until nothing moves; False if that takes too long."""
        self._stage.web.start()
        self._killer.start_worker()
        self._stage.beat.start()
        port = self._stage.wait_for_web()
        console.print(
            f"{len(self._deliveries)} deliveries in {len(self._sends)} requests, while the worker"
            f" is killed. To watch: http://127.0.0.1:{port}/?refresh=2\n{self._stage.scene.promise}",
            highlight=False,
            soft_wrap=True,
        )
        show = show_on(console, requests=len(self._sends), deliveries=len(self._deliveries))
        with contextlib.closing(self._traffic), contextlib.closing(self._broker), show:
            self._traffic.start(port)
            told = False
            while not self._at_rest():
                if time.monotonic() > deadline:
                    return False
                self._stage.check()
                self._traffic.check()
                self._strike_when_due(show)
                self._tell(show)
                if self._traffic.finished and not told:
                    told = True
                    show.say("All delivered. Waiting until the broker holds nothing any more.")
                time.sleep(_LOOK_S)
            self._tell(show)
        return True

    def report(self, *, at_rest: bool, seconds: float) -> Report:
        """Count what came of it."""
        return make_report(
            requests=self._traffic.requests,
            accepted=self._traffic.accepted,
            deliveries=self._deliveries,
            strikes=self._killer.strikes,
            outcomes=self._stage.outcomes,
            seconds=seconds,
            seed=self._seed,
            at_rest=at_rest,
            scene=self._stage.scene,
        )

    def _tell(self, show: Show) -> None:
        plain, idempotent = figures.ledgers()
        show.update(accepted=self._traffic.accepted, plain=plain, idempotent=idempotent)

    def _strike_when_due(self, show: Show) -> None:
        if not self._strikes:
            return
        if self._traffic.finished and self._broker.waiting() < self._processes:
            self._strikes.clear()  # too late: its processes will not all be at work any more
            return
        due, target = self._strikes[0]
        if figures.ledger(Kind.IDEMPOTENT).distinct < due * len(self._deliveries):
            return
        self._strikes.popleft()
        strike = self._killer.strike(target)
        if strike is None:
            self._strikes.appendleft((min(due + _LATER, 1.0), target))
            return
        show.say(f"SIGKILL to {target.value}. {strike.story()}")

    def _at_rest(self) -> bool:
        """Is everything delivered, and was there nothing to do for some looks in a row?

        A message that a killed worker held comes back when it was unacked for the visibility
        timeout; so nothing may be unacked either.
        """
        busy = not self._traffic.finished or self._broker.waiting() or self._killer.busy()
        unacked = self._broker.unacked()
        now = time.monotonic()
        if busy or not unacked:
            self._quiet_since = now
        elif now - self._quiet_since > _OVERDUE_S:
            # Before Celery 5.7 a worker looks for them every 100 s only, but also when it starts.
            self._killer.restart_worker()
            self._quiet_since = time.monotonic()
        self._quiet_looks = 0 if busy or unacked else self._quiet_looks + 1
        return self._quiet_looks >= _LOOKS_AT_REST
