"""The demo: deliver webhooks, kill the worker meanwhile, wait until nothing moves any more, count."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis import Redis
from rich.console import Console

from testproject.demo.traffic import Event, Traffic, plan_sends, plan_work
from testproject.embedded import EmbeddedRedis
from testproject.processes import Child, ProcessError, make_receiver, stop_all, wait_for_web

__all__ = ["perform"]

_LOOK_S: Final = 0.1
_LOOKS_AT_REST: Final = 4
_STOP_S: Final = 3.0
#: Deliver so many requests a second, but for at least so many seconds, if there are events enough.
_RATE: Final = 40.0
_AT_LEAST_S: Final = 9.0
_EVENT_S: Final = 0.25
#: No good moment for a kill within so many seconds: try again after so much more of the work.
_PATIENCE_S: Final = 2.5
_LATER: Final = 0.03
_STORES = {"redis": "{}", "django": "django://", "hybrid": "hybrid+{}"}


class Target(enum.Enum):
    """What a SIGKILL is sent to."""

    WORKER = "the worker"
    PROCESS = "a pool process"


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


@dataclass
class Stage:
    """The receiver's three processes, the servers and the directory that they use."""

    directory: Path
    redis_url: str
    store: str
    processes: int
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    keep: bool = False

    def __post_init__(self) -> None:
        env = {
            "DJANGO_ALLOWED_HOSTS": "127.0.0.1",
            "DJANGO_DEBUG": "0",
            "DJANGO_SECRET_KEY": secrets.token_hex(32),
            "DJANGO_SETTINGS_MODULE": "testproject.demo.settings",
            "GITHUB_WEBHOOK_SECRET": self.secret,
            "REDIS_URL": self.redis_url,
            "IDEMPOTENCY_STORE": _STORES[self.store].format(self.redis_url),
            "TESTPROJECT_DEMO": str(self.directory),
            "DATABASE_PATH": str(self.directory / "ledger.sqlite3"),
        }
        os.environ.update(env)
        self.children = make_receiver(self.directory, env, processes=self.processes)

    @property
    def atomic(self) -> bool:
        """Are a delivery's entry and its record one transaction?"""
        return self.store != "redis"

    @property
    def promise(self) -> str:
        """Say to a newcomer where the records are."""
        if not self.atomic:
            return (
                "The records are in Redis, the ledger is in SQLite: a kill may fall anywhere but between a"
                " run's write to the one and its write to the other (for that: --store django)."
            )
        cache = ", with a cache of the settled ones in Redis" if self.store == "hybrid" else ""
        return (
            f"Ledger and records are in SQLite{cache}: a run's entry and its record are one transaction, and a"
            " kill may fall anywhere."
        )


@contextlib.contextmanager
def _open_stage(processes: int, store: str) -> Iterator[Stage]:
    """Start the servers and make a directory; in the end stop everything, and remove it unless it is to be kept."""
    directory = Path(tempfile.mkdtemp(prefix="celery-idempotent-demo-"))
    stages: list[Stage] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, directory, stages)
        server = stack.enter_context(EmbeddedRedis())
        stages.append(Stage(directory, server.url(), store, processes))
        stack.callback(stop_all, stages[0].children, _STOP_S)
        yield stages[0]


def _remove(directory: Path, stages: list[Stage]) -> None:
    if not any(stage.keep for stage in stages):
        shutil.rmtree(directory, ignore_errors=True)


def perform(
    events: Sequence[Event],
    *,
    seed: int,
    processes: int,
    store: str,
    timeout_s: float,
    as_json: bool,
    keep: bool,
) -> int:
    """Perform the demo, print the report, return the exit code."""
    console = Console(stderr=as_json)
    begin = time.monotonic()
    with _open_stage(processes, store) as stage:
        stage.keep = keep
        _prepare_database()
        # Only now, with Django set up, its models can be imported.
        from testproject.demo.report import Report

        try:
            play = _Play(stage, events, seed)
            at_rest = play.run(console, deadline=begin + timeout_s)
            report = Report.count(
                deliveries={event.delivery_id for event in events},
                accepted=play.accepted,
                kills=play.kills,
                directory=stage.directory,
                seconds=time.monotonic() - begin,
                seed=seed,
                at_rest=at_rest,
                store=store,
                atomic=stage.atomic,
            )
        except ProcessError:
            stage.keep = True
            raise
        if not report.ok:
            stage.keep = True
            console.print("\n\n".join(f"--- {each.log}\n{each.tail()}" for each in stage.children))
        if as_json:
            print(json.dumps(report.as_json(), indent=2))
        else:
            report.print(console)
        if stage.keep:
            console.print(f"Logs and the database are in {stage.directory}")
    return 0 if report.ok else 1


def _prepare_database() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


class _Play:
    """One performance, on a stage that is set."""

    def __init__(self, stage: Stage, events: Sequence[Event], seed: int) -> None:
        from testproject.demo.rehearsal import PLAN, QUICK_S

        self._stage = stage
        self._events = events
        self._deliveries = len({event.delivery_id for event in events})
        # A source of chance for each purpose: what one takes does not change what others get.
        work = plan_work(events, chance=random.Random(f"work {seed}"), quick_s=QUICK_S)
        (stage.directory / PLAN).write_text(json.dumps(work))
        self._sends = plan_sends(
            events,
            chance=random.Random(f"sends {seed}"),
            rate=_RATE,
            at_least_s=min(_AT_LEAST_S, _EVENT_S * len(events)),
        )
        self._redis: Any = Redis.from_url(stage.redis_url, socket_timeout=5)
        self._killer = _Killer(stage, self._redis, random.Random(f"kills {seed}"))
        self._strikes = deque(_STRIKES[: max(2, self._deliveries // _A_STRIKE_FOR)])
        self.accepted = 0
        self.kills: list[Target] = []

    def run(self, console: Console, *, deadline: float) -> bool:
        """Deliver everything and wait until nothing moves; False if that takes too long."""
        from testproject.demo.report import Progress

        for child in self._stage.children:
            child.start()
        port = wait_for_web(self._stage.children)
        console.print(
            f"{self._deliveries} deliveries in {len(self._sends)} requests, while the worker"
            f" is killed. To watch: http://127.0.0.1:{port}/?refresh=2\n{self._stage.promise}",
            highlight=False,
            soft_wrap=True,
        )
        traffic = Traffic(self._events, self._sends, secret=self._stage.secret, port=port)
        progress = Progress(console, requests=len(self._sends), deliveries=self._deliveries)
        still, all_sent = 0, False
        with contextlib.closing(self._redis), traffic, progress:
            while still < _LOOKS_AT_REST:
                if time.monotonic() > deadline:
                    return False
                for child in self._stage.children:
                    child.check()
                traffic.check()
                self.accepted = traffic.accepted
                entered = progress.update(accepted=traffic.accepted)
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
        if all_sent and self._killer.waiting() < self._stage.processes:
            self._strikes.clear()  # too late: its processes will not all be at work any more
            return
        due, target = self._strikes[0]
        if entered < due * self._deliveries:
            return
        self._strikes.popleft()
        held = self._killer.strike(target)
        if not held:
            self._strikes.appendleft((min(due + _LATER, 1.0), target))
            return
        self.kills.append(target)
        progress.say(f"SIGKILL to {target.value}, which has {held} messages in hand.")


class _Killer:
    """Kills the worker, or one of its pool processes, at a random moment.

    A process that is stopped can be looked at before it is killed::

        SIGSTOP to the processes that are in a task, at a random moment ── look ── SIGKILL
                                                               └─ not now ── SIGCONT

    "Not now" is for two gaps that are not what is shown here. Kombu takes a message off the queue with BRPOP and notes
    it as unacked in a second step: a worker killed between the two takes the message with it, and no task class can
    bring it back. The other gap is that of rehearsal.py.
    """

    def __init__(self, stage: Stage, redis: Any, chance: random.Random) -> None:
        from testproject.demo.rehearsal import BUSY, GAP

        self._worker: Child = stage.children[-1]
        self._busy = stage.directory / BUSY
        self._gap = stage.directory / GAP
        self._redis = redis
        self._chance = chance

    def waiting(self) -> int:
        """Return the number of messages that no worker has fetched."""
        return int(self._redis.llen("celery"))

    def unacked(self) -> int:
        """Return the number of messages that a worker has, or had when it was killed."""
        return int(self._redis.hlen("unacked"))

    def strike(self, target: Target) -> int:
        """Kill in the middle of things; return how many messages were in hand, 0 if there was no good moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self._worker.check()
            time.sleep(self._chance.uniform(0, 0.1))
            if held := self._strike_now(target):
                return held
        return 0

    def _strike_now(self, target: Target) -> int:
        pids = self._pids()
        with _stopped(pids):
            if set(pids) != set(self._pids()) or not pids:
                return 0  # one was started meanwhile, and goes on while we look
            if target is Target.WORKER and not self._fetches_nothing():
                return 0
            held = self.unacked()
            with self._gap.open("wb") as gap:
                try:
                    fcntl.flock(gap, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return 0
                if target is Target.PROCESS:
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
    try:
        _send(pids, signal.SIGSTOP)
        time.sleep(0.02)  # in the kernel's own time
        yield
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: Sequence[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


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
