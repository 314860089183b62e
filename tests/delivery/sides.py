"""The two sides, plain Celery and ours, and the stage that a scenario plays on."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import GroupResult

from tests.delivery.beside_tasks import OURS, PLAIN, make_app
from tests.delivery.recorder import Recorder, here
from tests.support.apps import close_app, environment, forget_results
from tests.support.ledger import Growing
from tests.support.waiting import wait_for
from tests.support.workers import Worker

#: A result, or whatever a scenario waits for, is there after so many seconds, or never.
PATIENCE = 120

#: These end a delivery.
_ENDS = ("postrun", "revoked", "lost")

_numbers = itertools.count()

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Side:
    """An app with its worker, and everything that is known of the tasks that went through them."""

    def __init__(self, name: str, *, ours: bool, directory: Path, conf: dict[str, Any]) -> None:
        self.name = name
        self.ours = ours
        self.queue = f"{name}.queue"
        self.mortal_queue = f"{name}.mortal"
        self.node = f"{name}@localhost"
        self.recorder = Recorder(directory / f"{name}.jsonl")
        self.recorder.path.touch()
        conf = {
            **conf,
            "task_default_queue": self.queue,
            "task_routes": {"tests.elsewhere": {"queue": f"{name}.elsewhere"}},
            "event_exchange": f"{name}.events",
            "control_exchange": f"{name}.pidbox",
        }
        task_cls = OURS if ours else PLAIN
        self.app: Celery = make_app(task_cls, conf)

        def worker(name: str, queue: str, concurrency: int) -> Worker:
            # What is said to all workers is for the first alone: two would both store that a task is revoked.
            own = {**conf, "control_exchange": f"{name}.pidbox"}
            return Worker(
                "tests.delivery.beside_tasks",
                directory=directory,
                name=name,
                concurrency=concurrency,
                queues=(queue,),
                env=environment(own, task_cls=task_cls, record=str(self.recorder.path)),
                # The last name counts.
                arguments=("-E", "-n", f"{name}@localhost", "-Ofair"),
            )

        self.worker = worker(name, self.queue, 4)
        #: For tasks that end their process, of which it has one. Where two processes die at once, Celery may run a task
        #: again: while it looks after one, it takes the task of the other for one that was not begun.
        self.mortal = worker(f"{name}.mortal", self.mortal_queue, 1)
        self._workers = [self.worker, self.mortal]
        self._lock = threading.Lock()
        files = (self.recorder.path, *(Path(each.log_path) for each in self._workers))
        self._files = [Growing(each) for each in files]
        self.lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.log: dict[str, list[str]] = defaultdict(list)
        self._roots: dict[str, str] = {}
        self._scenarios: dict[str, set[str]] = defaultdict(set)
        self._stop = threading.Event()
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._capturing = threading.Event()
        self._backends: list[Any] = []

    def start(self) -> None:
        self._receiver.start()
        assert self._capturing.wait(PATIENCE), "no connection for events"
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        self._stop.set()
        self._receiver.join(10)
        for worker in self._workers:
            worker.kill()
        for backend in self._backends:
            forget_results(backend)
        close_app(self.app)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        with self.app.connection_for_read() as connection:
            receiver = self.app.events.Receiver(
                connection, handlers={"*": self._event}, node_id=f"{self.name}.watcher"
            )
            with receiver.consumer_context(wakeup=False) as (own, _, _):
                self._capturing.set()
                while not self._stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        own.drain_events(timeout=0.2)

    def _event(self, event: dict[str, Any]) -> None:
        if "uuid" in event:
            self.events[event["uuid"]].append(dict(event))

    def pump(self) -> None:
        """Read what was written since the last time."""
        with self._lock:
            for file in self._files:
                for raw in file.more():
                    self._take(file.path, raw)

    def _take(self, path: Path, raw: bytes) -> None:
        if path != self.recorder.path:
            text = raw.decode(errors="replace")
            if (found := _UUID.search(text)) and text.startswith("["):
                self.log[found[0]].append(text)
            return
        line = json.loads(raw)
        task_id, root = line["id"], line["root"]
        scenario = line["scenario"] or self._roots.get(root) or self._roots.get(task_id)
        self.lines[task_id].append(line)
        if scenario:
            self._scenarios[scenario].add(task_id)
            for each in (task_id, root):
                if each:
                    self._roots.setdefault(each, scenario)

    def ids(self, scenario: str) -> set[str]:
        """Return the ids of the tasks that belong to a scenario."""
        self.pump()
        return set(self._scenarios[scenario])

    # -- a scenario on this side ---------------------------------------------------------------------------------------

    def play(self, name: str, function: Any, absent: int) -> Stage:
        """Play a scenario, and wait until all that it set off has ended."""
        stage = Stage(self, name)
        here.scenario, here.recorder = name, self.recorder
        self.app.set_current()
        self._backends.append(self.app.backend)
        try:
            function(stage)
        finally:
            here.scenario = here.recorder = None
        self.settle(name, absent)
        return stage

    def settle(self, name: str, absent: int) -> None:
        """Wait until every message of a scenario but ``absent`` ones is done, and until all is told."""
        wait_for(
            lambda: len(self._unfinished(name)) <= absent,
            PATIENCE,
            lambda: f"the end of {self._unfinished(name)}",
            interval=0.05,
        )
        self._fence(name)
        unfinished = self._unfinished(name)
        assert len(unfinished) == absent, unfinished

    def _unfinished(self, name: str) -> list[tuple[str, str]]:
        found = []
        for task_id in self.ids(name):
            kinds = [line["kind"] for line in list(self.lines[task_id])]
            failed = [e for e in list(self.events[task_id]) if e["type"] == "task-failed"]
            if kinds.count("publish") > max(sum(map(kinds.count, _ENDS)), len(failed)):
                task = next(x for x in self.lines[task_id] if x["kind"] == "publish")
                found.append((task_id, task["headers"]["task"]))
        return found

    def _fence(self, name: str) -> None:
        """Wait for a message that was sent after all others, and for the events of its end."""
        lines = [line for task_id in self.ids(name) for line in list(self.lines[task_id])]
        mortal = any(line.get("routing_key") == self.mortal_queue for line in lines)
        for worker, queue in ((self.worker, self.queue), (self.mortal, self.mortal_queue)):
            if worker is self.worker or mortal:
                fence = self.app.tasks["tests.fence"].apply_async(queue=queue)
                wait_for(
                    lambda fence=fence: [
                        e for e in self.events[fence.id] if e["type"] == "task-succeeded"
                    ],
                    PATIENCE,
                    lambda worker=worker: f"the fence of {worker.name}; its log:\n{worker.tail()}",
                )
        self.pump()


class Stage:
    """One side as a scenario sees it: its tasks by their short names, and a book for what it sees."""

    def __init__(self, side: Side, scenario: str) -> None:
        self.side = side
        self.scenario = scenario
        self.app: Any = side.app
        self.ours = side.ours
        #: The queue of what ends its own process.
        self.mortal = side.mortal_queue
        self.notes: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return self.app.tasks[f"tests.{name}"]

    def note(self, what: str, value: Any = None) -> Any:
        """Put something into the comparison; return it."""
        self.notes.append((what, value if isinstance(value, (str, type(None))) else repr(value)))
        return value

    def get(self, result: Any, **options: Any) -> Any:
        """Return the value of a result, and note all that the result says of itself."""
        value = result.get(timeout=PATIENCE, **options)
        self.note("result", _portrait(result, family=False))
        return value

    def error(self, result: Any) -> Any:
        """Return the exception that a task or group failed with."""
        try:
            value = result.get(timeout=PATIENCE)
        except Exception as error:  # noqa: BLE001  whatever the task raised
            # A parent's exception is raised before its children are marked.
            self.wait(result.ready)
            self.note("result", _portrait(result, family=False))
            self.note("raised", error)
            return error
        raise AssertionError(f"{result!r} did not fail: {value!r}")

    def see(self, result: Any, what: str = "result") -> None:
        """Note what a result says of itself, its parents and its children."""
        self.note(what, _portrait(result))

    def state(self, result: Any, *states: str) -> Any:
        """Wait until a result has one of these states; return what it has as its result."""
        wait_for(
            lambda: result.state in states,
            PATIENCE,
            lambda: f"{states}, is {result.state}: {result.result!r}",
            interval=0.02,
        )
        self.note("state", (result.state, repr(result.result)))
        return result.result

    def seen(self, task_id: str, what: str) -> list[Any]:
        """Return what the task noted as ``what``, so far."""
        self.side.pump()
        return [
            line["values"]
            for line in list(self.side.lines[task_id])
            if line["kind"] == "note" and line["what"] == what
        ]

    def wait_seen(self, task_id: str, what: str, times: int = 1) -> list[Any]:
        """Wait until the task noted ``what`` so many times."""
        wait_for(
            lambda: len(self.seen(task_id, what)) >= times,
            PATIENCE,
            lambda: f"{what} of {task_id}, has {self.side.lines[task_id]}",
            interval=0.02,
        )
        return self.seen(task_id, what)

    def kinds(self, task_id: str) -> list[str]:
        """Return what was told of a task by signals, so far."""
        self.side.pump()
        return [line["kind"] for line in list(self.side.lines[task_id])]

    def wait(self, condition: Any, what: str = "the condition") -> Any:
        return wait_for(condition, PATIENCE, what, interval=0.02)

    @contextlib.contextmanager
    def gate(self) -> Iterator[Path]:
        """Give a path that comes to be when the block is left."""
        number = next(_numbers)
        path = self.side.recorder.path.with_name(f"gate-{self.side.name}-{number}")
        yield path
        path.touch()


def _portrait(result: Any, *, family: bool = True) -> Any:
    """Return all that a result says; of its family only the ids, where members may be at work still."""
    if result is None:
        return None
    if isinstance(result, GroupResult):
        parent = _portrait(result.parent) if family else None
        return {
            "group": [_portrait(each, family=family) for each in result.results or ()],
            "in": parent,
        }
    children = getattr(result, "children", None) or []
    parent = getattr(result, "parent", None)
    return {
        "id": result.id,
        "state": result.state,
        "result": repr(result.result),
        "ends": (result.ready(), result.successful(), result.failed()),
        "children": sorted(str(_portrait(each) if family else each.id) for each in children),
        "parent": _portrait(parent) if family else parent and parent.id,
    }
