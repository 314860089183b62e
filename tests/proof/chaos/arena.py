"""A run of chaos: servers, two workers, callers, and faults between them; what happens is noted in a file."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from tests.proof.chaos.checker import missing
from tests.proof.chaos.plan import Call, Plan, Strike
from tests.proof.chaos.servers import Server, Servers
from tests.proof.chaos.tasks import CANVASES, LEASE, NOTES, call, make_app, note, note_verbs
from tests.support.apps import close_app, environment
from tests.support.ledger import Lines
from tests.support.sites import IMPATIENT
from tests.support.workers import Worker

#: So many effects may be due before further calls wait.
OPEN = 100
#: Longer than a lease: what the broker gives back is free then.
VISIBILITY = 8


class Arena:
    """What faults strike."""

    def __init__(
        self,
        servers: Servers,
        directory: Path,
        library: str = "ours",
        *,
        fused: bool = False,
        concurrency: int = 2,
    ) -> None:
        self.servers: Servers = servers
        self._directory, self._library, self._concurrency = directory, library, concurrency
        path = directory / f"notes-{library}.jsonl"
        self._lines: Lines[dict[str, Any]] = Lines(path, lambda line: dict(line))
        is_redis = servers.broker.kind == "redis"
        redis_options = IMPATIENT | {"visibility_timeout": VISIBILITY}
        results = f"redis://127.0.0.1:{servers.results.port}/0"
        settings = {
            "broker_url": servers.broker_url,
            "broker_transport_options": redis_options if is_redis else {"confirm_publish": True},
            "broker_connection_retry_on_startup": True,
            "broker_connection_timeout": 2,
            # Results beside the records are written with them.
            "result_backend": servers.store_url if fused else results,
            "task_acks_on_timeout": False,
            "worker_prefetch_multiplier": 2,
            "longest_pause": 2,
            "idempotency_store": servers.store_url,
            "idempotency_lease": LEASE,
            "idempotency_max_crashes": 50,
            "idempotency_sweep_interval": None,
        }
        self._env = {NOTES: str(path), **environment(settings, library=library)}
        if servers.databases:
            self._env["DJANGO_SETTINGS_MODULE"] = "tests.sql.atomic_settings"
            self._env["ATOMIC_DATABASES"] = json.dumps(servers.databases)
        os.environ |= self._env
        settings["result_backend"] = results  # a caller listens there, and would wait for the store
        # Nobody waits for results here; each would be unsubscribed from a server that may be gone.
        AsyncResult.__del__ = lambda _: None  # type: ignore[method-assign]
        self.app: Celery = make_app(settings, library)
        note_verbs()
        if servers.databases:
            from django.core.management import call_command

            call_command("migrate", database="direct", verbosity=0)
            columns = "unit VARCHAR(99), token BIGINT, task VARCHAR(64)"
            self.query(f"CREATE TABLE IF NOT EXISTS chaos_effects ({columns})")
        self.workers = [self._worker(f"w{n}") for n in range(2)]
        self._old: list[Worker] = []
        self._children: dict[str, list[int]] = {}
        self._calls: queue.Queue[Call] = queue.Queue()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._make_calls, daemon=True) for _ in range(6)]
        if library == "ours":
            self._threads.append(threading.Thread(target=self._sweep, daemon=True))
        self._ahead = 0
        self.frozen: list[int] = []

    def __enter__(self) -> Arena:
        for worker in self.workers:
            worker.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for worker in (*self.workers, *self._old):
            worker.kill()
        for thread in self._threads:
            thread.join(5)
        with contextlib.suppress(Exception):
            close_app(self.app)

    def _worker(self, name: str) -> Worker:
        module = "tests.proof.chaos.tasks"
        how: dict[str, Any] = {"directory": self._directory, "concurrency": self._concurrency}
        return Worker(module, name=name, env=self._env, **how)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the database, past the proxy, on a connection that no fault has met yet."""
        from django.db import connections

        connections["direct"].close()
        with connections["direct"].cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def notes(self) -> list[dict[str, Any]]:
        """Return what was noted, the effects that are in the database, and what the Sentinel did."""
        rows: list[tuple[Any, ...]] = []
        if self.servers.databases:
            rows = self.query("SELECT unit, token, task FROM chaos_effects")
        found = [
            {"t": 0.0, "what": "effect", "unit": unit, "token": token} for unit, token, _ in rows
        ]
        split = [{"t": t, "what": "split", "end": end} for t, end in self.servers.two_masters()]
        return self._lines.read() + found + split

    # -- calls ---------------------------------------------------------------------------------------------------------

    def submit(self, wish: Call) -> None:
        self._calls.put(wish)

    def _make_calls(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(queue.Empty):
                self._make(self._calls.get(timeout=0.2))
                self._calls.task_done()

    def _make(self, wish: Call) -> None:
        """Make a call until it is accepted, as a client does; a canvas, which has no key, once."""
        first = time.time()
        while not self._over.is_set():
            self._begin_request()
            try:
                units, result = call(self.app, wish, self._library)
            except Exception as error:  # noqa: BLE001  of a store, a broker, a library
                if wish.kind in CANVASES:
                    note("unsure", key=wish.key, error=type(error).__name__)
                    return
                self._over.wait(0.5)
            else:
                about = {"kind": wish.kind, "key": wish.key, "first": first, "units": units}
                note("call", **about, result=getattr(result, "id", None))
                return

    def _sweep(self) -> None:
        from celery_idempotent.celery.sweep import sweep

        while not self._over.wait(2):
            self._begin_request()
            with contextlib.suppress(Exception):
                sweep(self.app)

    def _begin_request(self) -> None:
        """Have Django drop a connection that is lost, as it does before a request and a task."""
        if self.servers.databases:
            from django.db import close_old_connections

            close_old_connections()

    # -- what faults ask for -------------------------------------------------------------------------------------------

    def call(self, chance: float, *, hangs: bool = False, options: Any = None) -> str:
        """Make a call of a fault's own, and return its key."""
        key = f"fault-{chance}"
        self.submit(Call(0, "keyed", key, 0.01, 0.01, "", hangs, options or {}))
        return key

    def results(self, chance: float) -> list[str]:
        calls = [each for each in self._lines.read() if each["what"] == "call"]
        return [each["result"] for each in calls if each["key"] == f"fault-{chance}"]

    def pids(self, chance: float) -> list[int]:
        """Return the processes of a worker, the main one first."""
        worker = self.workers[int(chance * 1000) % 2]
        return [worker.pid, *worker.children()]

    def child(self, chance: float) -> int:
        _, *children = self.pids(chance)
        return children[int(chance * 10_000) % len(children)]

    def succeed(self, chance: float) -> list[int]:
        """Start a worker in the place of one that is to end."""
        place, pids = int(chance * 1000) % 2, self.pids(chance)
        self._old.append(old := self.workers[place])
        old.send_signal(signal.SIGTERM)
        self.workers[place] = self._worker(f"w{place}-{len(self._old)}").start(ready=False)
        return pids

    def store(self, chance: float) -> Server:
        return self.servers.stores[int(chance * 1000) % len(self.servers.stores)]

    def redis(self, chance: float) -> Server:
        found = [each for each in self.servers.stores if each.kind == "redis"]
        return found[int(chance * 1000) % len(found)]

    def step_clock(self, seconds: int) -> None:
        if not self.servers.shifted:
            raise LookupError("left out: there is no C compiler for a clock that can be stepped")
        self._ahead += seconds
        self.servers.set_clock(self._ahead)

    # -- the run -------------------------------------------------------------------------------------------------------

    def play(self, plan: Plan) -> None:
        """Make the calls of a plan and strike its faults, each at its time, those of a lane in turn."""
        began = time.monotonic()
        lanes = {each.fault.lane: threading.Thread() for each in plan.strikes}
        for lane in lanes:
            strikes = [(n, x) for n, x in enumerate(plan.strikes) if x.fault.lane == lane]
            lanes[lane] = threading.Thread(target=self._strike, args=(strikes, began), daemon=True)
            lanes[lane].start()
        calls, looked, room = deque(plan.calls), 0.0, OPEN
        # A machine that is busy makes fewer of them.
        while any(thread.is_alive() for thread in lanes.values()) or (calls and not lanes):
            if time.monotonic() > looked + 0.3:
                self._supervise()
                due = [
                    each for each in missing(self._lines.read()) if not each.startswith("atomic")
                ]
                room = OPEN - len(due) - self._calls.unfinished_tasks
                looked = time.monotonic()
            if room > 0 and calls and began + calls[0].at <= time.monotonic():
                self._calls.put(calls.popleft())
                room -= 1
            else:
                time.sleep(0.02)

    def _strike(self, strikes: list[tuple[int, Strike]], began: float) -> None:
        for n, each in strikes:
            time.sleep(max(0.0, began + each.at - time.monotonic()))
            note("strike", n=n, fault=each.fault.name, explains=each.fault.explains)
            if self._attempt(n, "struck", each.fault.begin, each.chance):
                time.sleep(each.seconds)
                self._attempt(n, "healed", each.fault.heal, each.chance)

    def _attempt(
        self, n: int, what: str, strike: Callable[[Arena, float], Any], chance: float
    ) -> bool:
        try:
            found = strike(self, chance)
        except Exception as error:  # noqa: BLE001  its target is away already
            note("missed", n=n, why=f"{type(error).__name__}: {error}"[:200])
            return False
        note(what, n=n, hit=found if isinstance(found, list) else [str(found)])
        return True

    def _supervise(self) -> None:
        """Start again what has ended, as a supervisor does."""
        for worker in self.workers:
            if worker.running:
                self._children[worker.name] = [worker.pid, *worker.children()]
            else:
                pids = self._children.get(worker.name, [])
                note("ended", pids=pids, code=worker.exit_code, name=worker.name)
                worker.kill()  # with its children
                worker.start(ready=False)

    def rest(self, is_over: Callable[[], bool], *, quiet_s: float, longest_s: float) -> None:
        """Wait until all is done, or nothing happens any more."""
        heard = begun = time.monotonic()
        size = 0
        while (now := time.monotonic()) - heard < quiet_s and now - begun < longest_s:
            self._supervise()
            if len(self._lines.read()) != size:
                size, heard = len(self._lines.read()), now
            if not self._calls.unfinished_tasks and is_over():
                return
            time.sleep(0.5)
