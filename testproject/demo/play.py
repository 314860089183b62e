"""The demo: deliver webhooks, kill the worker meanwhile, wait until nothing moves any more, count."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import django
from django.core.management import call_command
from redis import Redis
from rich.console import Console

from testproject.demo.traffic import Event, Traffic, plan_sends, plan_work
from testproject.serve import Child, ProcessError, check_all, open_stage, start_all

_LOOK_S: Final = 0.1
_LOOKS_AT_REST: Final = 4
#: Deliver so many requests a second, but for at least so many seconds, if there are events enough.
_RATE: Final = 40.0
_AT_LEAST_S: Final = 9.0
_EVENT_S: Final = 0.25
#: No good moment for a kill within so many seconds: try again after so much more of the work.
_PATIENCE_S: Final = 2.5
_LATER: Final = 0.03
_PROCESSES: Final = 4
_TIMEOUT_S: Final = 240.0
_STORES: Final = {"redis": "{}", "django": "django://", "hybrid": "hybrid+{}"}
#: What the demo says about where the records are, whether in SQLite as the ledger is.
_PROMISES: Final = {
    False: "The records are in Redis, the ledger is in SQLite: a kill may fall anywhere but between a run's write to"
    " the one and its write to the other (for that: --store django).",
    True: "Ledger and records are in SQLite: a run writes both in one transaction, and a kill may fall anywhere.",
}
#: After how much of the work a SIGKILL is sent, and to what.
_WORKER: Final = "the worker"
_PROCESS: Final = "a pool process"
_STRIKES: Final = tuple(zip((0.15, 0.30, 0.45, 0.65, 0.80), (_WORKER, _PROCESS) * 3, strict=False))
#: A strike for so many deliveries each, and no fewer than the first two.
_A_STRIKE_FOR: Final = 8


def perform(events: Sequence[Event], *, seed: int, store: str, as_json: bool) -> int:
    """Perform the demo, print the report, return the exit code."""
    console = Console(stderr=as_json)
    begin = time.monotonic()
    os.environ["GITHUB_WEBHOOK_SECRET"] = secrets.token_hex(16)
    stage = open_stage(
        "demo", "testproject.demo.settings", processes=_PROCESSES, store=_STORES[store]
    )
    with stage as children:
        directory = children[0].directory
        django.setup()
        call_command("migrate", verbosity=0)
        # Only now, with Django set up, its models can be imported.
        from testproject.demo.report import Report
        from testproject.webhooks.figures import ledgers

        play = _Play(children, events, seed)
        try:
            at_rest = play.run(console, _PROMISES[store != "redis"], deadline=begin + _TIMEOUT_S)
        except ProcessError:
            (directory / "keep").touch()
            raise
        plain, idempotent = ledgers()
        report = Report(
            accepted=play.accepted,
            deliveries=play.deliveries,
            plain=plain,
            idempotent=idempotent,
            outcomes=dict(play.outcomes()),
            worker_kills=play.kills.count(_WORKER),
            process_kills=play.kills.count(_PROCESS),
            seconds=round(time.monotonic() - begin, 1),
            seed=seed,
            at_rest=at_rest,
            store=store,
        )
        if as_json:
            print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
        else:
            report.print(console)
        if not report.ok:
            (directory / "keep").touch()
            console.print("\n\n".join(f"--- {each.log}\n{each.tail()}" for each in children))
            console.print(f"Logs and the database are in {directory}")
    return 0 if report.ok else 1


class _Play:
    """One performance, on a stage that is set."""

    def __init__(self, children: Sequence[Child], events: Sequence[Event], seed: int) -> None:
        from testproject.demo.rehearsal import OUTCOMES, PLAN, QUICK_S

        self._children, directory = children, children[0].directory
        self._outcomes = directory / OUTCOMES
        self.deliveries = len({event.delivery_id for event in events})
        # A source of chance for each purpose: what one takes does not change what others get.
        work = plan_work(events, chance=random.Random(f"work {seed}"), quick_s=QUICK_S)
        (directory / PLAN).write_text(json.dumps(work))
        self._sends = plan_sends(
            events,
            chance=random.Random(f"sends {seed}"),
            rate=_RATE,
            at_least_s=min(_AT_LEAST_S, _EVENT_S * len(events)),
        )
        self._redis: Any = Redis.from_url(os.environ["REDIS_URL"], socket_timeout=5)
        chance = random.Random(f"kills {seed}")
        self._killer = _Killer(children[-1], self._redis, chance)
        self._strikes = deque(_STRIKES[: max(2, self.deliveries // _A_STRIKE_FOR)])
        self.accepted = 0
        self.kills: list[str] = []

    def outcomes(self) -> Counter[str]:
        """How often there was each outcome; ``"swept"`` is how many records the sweeps interrupted."""
        return Counter(self._outcomes.read_text().split() if self._outcomes.exists() else ())

    def run(self, console: Console, promise: str, *, deadline: float) -> bool:
        """Deliver everything and wait until nothing moves; False if that takes too long."""
        from testproject.demo.report import Progress

        port = start_all(self._children)
        console.print(
            f"{self.deliveries} deliveries in {len(self._sends)} requests, while the worker"
            f" is killed. To watch: http://127.0.0.1:{port}/?refresh=2\n{promise}",
            highlight=False,
            soft_wrap=True,
        )
        traffic = Traffic(self._sends, secret=os.environ["GITHUB_WEBHOOK_SECRET"], port=port)
        progress = Progress(console, requests=len(self._sends), deliveries=self.deliveries)
        still, all_sent = 0, False
        with contextlib.closing(self._redis), traffic, progress:
            while still < _LOOKS_AT_REST:
                if time.monotonic() > deadline:
                    return False
                check_all(self._children)
                self.accepted = traffic.accepted
                entered = progress.show(accepted=self.accepted)
                self._strike_when_due(progress, entered, all_sent)
                if traffic.finished and not all_sent:
                    all_sent = True
                    progress.say("All delivered. Waiting until the broker holds nothing any more.")
                # What a killed worker held comes back after the visibility timeout: nothing may be unacked either.
                moving = not traffic.finished or self._killer.waiting() or self._killer.unacked()
                still = 0 if moving else still + 1
                time.sleep(_LOOK_S)
        return True

    def _strike_when_due(self, progress: Any, entered: int, all_sent: bool) -> None:
        if not self._strikes:
            return
        if all_sent and self._killer.waiting() < _PROCESSES:
            self._strikes.clear()  # too late: they will not all be at work any more
            return
        due, target = self._strikes[0]
        if entered < due * self.deliveries:
            return
        self._strikes.popleft()
        held = self._killer.strike(target)
        if not held:
            self._strikes.appendleft((min(due + _LATER, 1.0), target))
            return
        self.kills.append(target)
        progress.say(f"SIGKILL to {target}, which has {held} messages in hand.")


class _Killer:
    """Kills the worker, or one of its pool processes, at a random moment.

    A process that is stopped can be looked at before it is killed::

        SIGSTOP to the processes that are in a task, at a random moment ── look ── SIGKILL
                                                               └─ not now ── SIGCONT

    "Not now" is for two gaps that are not what is shown here. Kombu takes a message off the queue with BRPOP and notes
    it as unacked in a second step: a worker killed between the two takes the message with it, and no task class can
    bring it back. The other gap is that of rehearsal.py.
    """

    def __init__(self, worker: Child, redis: Any, chance: random.Random) -> None:
        from testproject.demo.rehearsal import BUSY, GAP

        self._worker, self._redis, self._chance = worker, redis, chance
        self._busy, self._gap = worker.directory / BUSY, worker.directory / GAP

    def waiting(self) -> int:
        """Return the number of messages that no worker has fetched."""
        return int(self._redis.llen("celery"))

    def unacked(self) -> int:
        """Return the number of messages that a worker has, or had when it was killed."""
        return int(self._redis.hlen("unacked"))

    def strike(self, target: str) -> int:
        """Kill in the middle of things; return how many messages were in hand, 0 if there was no good moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            check_all([self._worker])
            time.sleep(self._chance.uniform(0, 0.1))
            if held := self._strike_now(target):
                return held
        return 0

    def _strike_now(self, target: str) -> int:
        pids = self._pids()
        with _stopped(pids):
            if set(pids) != set(self._pids()) or not pids:
                return 0  # one was started meanwhile, and goes on while we look
            if target == _WORKER and not self._fetches_nothing():
                return 0
            held = self.unacked()
            with self._gap.open("wb") as gap:
                try:
                    fcntl.flock(gap, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return 0
                if target == _PROCESS:
                    os.kill(self._chance.choice(pids), signal.SIGKILL)
                    return held
                self._worker.kill()
        shutil.rmtree(self._busy, ignore_errors=True)
        self._worker.start()
        return held

    def _pids(self) -> list[int]:
        noted = (int(path.name) for path in self._busy.glob("*"))
        return sorted(pid for pid in noted if _state(pid) not in ("", "Z"))

    def _fetches_nothing(self) -> bool:
        """Wait until the worker, whose processes take nothing, fetches nothing more; False if it does.

        What it fetched last may be on its way from the socket to "unacked": so it has to be asleep each time, and
        nothing may wait in a socket, which kombu reads only when another message is done.
        """
        main = self._worker.launched and self._worker.launched.server_pid
        still = 0
        for _ in range(25):
            time.sleep(0.02)
            clients = self._redis.client_list()
            fetching = any(each["cmd"] == "brpop" and "b" in each["flags"] for each in clients)
            asleep = main and _state(main) == "S" and not _has_unread(main)
            still = still + 1 if asleep and not fetching else 0
            if still == 3:
                return True
        return False


@contextlib.contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes where they are; in the end, continue those that are still there."""

    def send(which: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    try:
        send(signal.SIGSTOP)
        time.sleep(0.02)  # in the kernel's own time
        yield
    finally:
        send(signal.SIGCONT)


def _state(pid: int) -> str:
    """Return the state of a process as Linux has it, ``"S"`` for asleep, empty for none; elsewhere ``"S"``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "S"


def _has_unread(pid: int) -> bool:
    """Has a process data in a TCP socket that it did not read, as far as this system tells?"""
    process, sockets = Path(f"/proc/{pid}"), set()
    try:
        connections = (process / "net/tcp").read_text().splitlines()[1:]
        for file in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(file.readlink()))
    except FileNotFoundError:
        return False
    for fields in map(str.split, connections):
        unread, inode = int(fields[4].partition(":")[2], 16), fields[9]
        if unread and f"socket:[{inode}]" in sockets:
            return True
    return False
