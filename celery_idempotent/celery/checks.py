"""Checks how an app, its store and its broker are set up for idempotent tasks.

``check_settings`` looks at the app alone, without any server; ``check_store`` asks the store and its servers. A worker
that starts runs both in a thread and logs a line for each finding.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from celery.app.routes import Router

from celery_idempotent.celery.definition import Definition
from celery_idempotent.celery.registry import load_tasks, loaded
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.errors import (
    IdempotencyError,
    InvalidOption,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.protocol.atomic import transactional
from celery_idempotent.records import Identity
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery, Task

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store
    from celery_idempotent.stores.base import ServerFacts

__all__ = ["Finding", "check", "check_or_raise", "check_settings", "check_store"]

logger = logging.getLogger(__name__)

#: The idempotent tasks by name, each with the definition that its options make.
Tasks = Mapping[str, "tuple[Task[..., object], Definition]"]

#: The oldest releases that have the commands that the store uses.
_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}

#: A key that no call has: no task has such a name.
_UNUSED = Identity(namespace="celery_idempotent:check", key="-")

#: How many task names a finding lists.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can go wrong. ``id`` begins with E where tasks will not run, with W where they will."""

    id: str
    problem: str
    hint: str

    @property
    def level(self) -> Literal["error", "warning"]:
        """Whether tasks will not run, or will."""
        return "error" if self.id.startswith("E") else "warning"


def check(app: AnyCelery) -> list[Finding]:
    """Return all findings about an app: its tasks are imported, and its store is asked."""
    return [*check_settings(app), *check_store(app)]


def check_settings(app: AnyCelery) -> list[Finding]:
    """Return the findings that need no server, once all of the app's tasks are imported."""
    try:
        load_tasks(app)
        tasks = _tasks(app)
    except InvalidOption as error:
        hint = "Set it to what is allowed; a worker does not start like this."
        return [Finding(id="E013", problem=str(error), hint=hint)]
    except Exception as error:  # noqa: BLE001  # a module of the project may raise anything
        # Only an ImportError's text is shown: any other may contain a secret, a connection's password for instance.
        text = f": {error}" if isinstance(error, ImportError) else ""
        return [
            Finding(
                id="E021",
                problem=f"The app's tasks cannot be imported ({type(error).__name__}{text}): no worker starts.",
                hint="Import them in a shell to see where that comes from.",
            )
        ]
    if not tasks:
        return []
    try:
        store = get_store(app)
        unbounded = list(_unbounded_waits(store))  # reads the settings of a database
    except IdempotencyError as error:
        hint = "Set idempotency_store to a URL or a store; a worker does not start like this."
        return [Finding(id="E001", problem=str(error), hint=hint)]
    return [*(each for look in _LOOKS for each in look(app, tasks)), *_in_memory(store), *unbounded]


def check_store(app: AnyCelery) -> list[Finding]:
    """Return the findings about the store and its servers, which are asked."""
    try:
        load_tasks(app)
        if not _tasks(app):
            return []
        store = get_store(app)
        list(_unbounded_waits(store))
    except Exception:  # noqa: BLE001  # reported as E001, E013 or E021
        return []
    return _ask(store)


def check_or_raise(app: Celery) -> None:
    """Check what every task needs, without asking any server.

    Raises:
        IdempotencyError: if an option is bad, if there is no store, or if a task is atomic and the store knows no
            transactions.
    """
    tasks = _tasks(app)
    if not tasks:
        return
    store = get_store(app)
    list(_unbounded_waits(store))
    for name, (_, definition) in tasks.items():
        if definition.policy.atomic:
            transactional(store, name)


def check_in_thread(app: Celery) -> None:
    """Log the findings from a daemon thread.

    A server that does not answer must delay neither the worker's first message nor its end.
    """
    loaded.add(app)  # the worker has imported its tasks
    name = "celery-idempotent-checks"
    threading.Thread(target=_log_findings, args=(app,), name=name, daemon=True).start()


def _log_findings(app: Celery) -> None:
    try:
        for look in (check_settings, check_store):  # first those that need no server
            for each in look(app):
                level = logging.ERROR if each.level == "error" else logging.WARNING
                said = f"{each.problem.rstrip('.')}. {each.hint}"
                extra = {"idempotency_finding": each.id}
                logger.log(level, "idempotency: %s %s", each.id, said, extra=extra)
    except Exception:
        logger.warning("idempotency: the checks themselves failed", exc_info=True)


def _tasks(app: Celery) -> Tasks:
    """Return the idempotent tasks of the app.

    Raises:
        InvalidOption: if an option of one is bad.
    """
    found = {}
    for name, task in sorted(app.tasks.items()):
        if not hasattr(task, "idempotency_definition"):
            continue
        # A call, which makes the definition where it is missing: a task with bad options is registered without one.
        definition = task.idempotency_definition()
        if definition is not None:
            found[str(name)] = (task, definition)
    return found


def _named(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _acks_late(_app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks that a crash loses. In mode "observe" a task is acknowledged as without us."""
    early = [
        name
        for name, (task, each) in tasks.items()
        if not task.acks_late and each.policy.mode == "enforce"
    ]
    if early:
        yield Finding(
            id="W002",
            problem=f"Acknowledged before they run, and so lost with a worker that dies: {_named(early)}.",
            hint="Leave acks_late to IdempotentTask, which sets it, or set it to True.",
        )


def _scheduled_sweep(app: Celery, _tasks: Tasks) -> Iterator[Finding]:
    if app.conf.get("idempotency_sweep_interval", 30) is not None:
        return
    for entry in (app.conf.beat_schedule or {}).values():
        if (entry["task"] if isinstance(entry, dict) else entry.task) == SWEEP:
            return
    yield Finding(
        id="W003",
        problem="No sweep is scheduled: claims of workers that died stay PROCESSING until their key is asked for"
        " again, and idempotency_on_stale does nothing.",
        hint=f"Set idempotency_sweep_interval, or run the task {SWEEP} every half minute.",
    )


def _visibility(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find leases that are longer than the broker waits for an acknowledgement.

    Here the broker waits 30 s, and the lease is 60 s::

        worker A   claim ─ ✗ killed
        broker              30 s: delivers it again       60 s: the lease ends
        worker B                    Held: republished, again and again ─ claim: runs
    """
    broker = redelivery_timeout(app)
    if broker is None:
        return
    most_ms = broker.seconds * 1000
    longer = [name for name, (_, each) in tasks.items() if each.policy.lease_ms >= most_ms]
    if longer:
        yield Finding(
            id="W004",
            problem=f"The {broker.option} ({broker.seconds:g} s) is not longer than the lease: after a crash the"
            f" message is delivered again and republished until the lease ends. Tasks: {_named(longer)}.",
            hint=f"Set idempotency_lease below the {broker.option}, or that in broker_transport_options higher.",
        )


def _broadcast(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks that are routed to a fanout exchange, which gives each message to all of its queues."""
    queues: Any = app.amqp.queues
    fanouts = {name for name, queue in queues.items() if _is_fanout(queue)}
    fanouts |= {queues[name].exchange.name for name in fanouts}
    if not fanouts:
        return
    # A copy: the app's own adds each queue that is looked up, and workers would consume it.
    known: Any = {**queues, **queues.aliases}
    router: Any = Router(app.amqp.routes, known, app=app)
    found = []
    for name, (task, _) in tasks.items():
        options = {each: getattr(task, each, None) for each in ("queue", "exchange")}
        given = {each: value for each, value in options.items() if value}
        try:
            route = router.route(given, name, task_type=task)
        except Exception:  # noqa: BLE001  # an unknown queue, or a router of the project
            route = {}
        targets = {str(getattr(route.get(each), "name", route.get(each))) for each in route}
        if targets & fanouts:
            found.append(name)
    if found:
        yield Finding(
            id="W023",
            problem="Published to a fanout exchange, which gives each message to many workers: without a key nothing is"
            f" guarded, with one a single worker runs it and all others wait for its result: {_named(found)}.",
            hint="Route the task to a queue with a direct exchange, or set idempotency_mode='off' if each worker shall"
            " run it.",
        )


def _is_fanout(queue: Any) -> bool:
    return queue.exchange is not None and queue.exchange.type == "fanout"


def _unscoped(_app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks whose keys two tenants of django-tenants would share."""
    # Django imports each app that is installed; the core imports nothing of Django.
    if "django_tenants" not in sys.modules:
        return
    shared = [name for name, (_, each) in tasks.items() if each.keyed and not each.scoped]
    if shared:
        yield Finding(
            id="W024",
            problem="django-tenants is installed, and a key of these tasks is one key for all tenants: "
            f"{_named(shared)}.",
            hint="Set idempotency_scope so that it names the tenant, as docs/tenants.md says.",
        )


_LOOKS: tuple[Callable[[Celery, Tasks], Iterator[Finding]], ...] = (
    _acks_late,
    _broadcast,
    _scheduled_sweep,
    _visibility,
    _unscoped,
)


def _in_memory(store: Store) -> Iterator[Finding]:
    if type(store).__name__ == "MemoryStore":
        yield Finding(
            id="W005",
            problem="The store is the memory of each process: two processes know nothing of each other's keys.",
            hint="Set idempotency_store to a Redis or a database; memory:// is for tests.",
        )


def _unbounded_waits(store: Store) -> Iterator[Finding]:
    """Find out whether tasks would wait without end for a database server that does not answer."""
    if missing := store.missing_bounds():
        yield Finding(
            id="W020",
            problem="A database server that accepts connections and stays silent is waited for without end, or for"
            f" minutes: by tasks, and by the thread that keeps claims alive. {store!r} sets no {', '.join(missing)}.",
            hint="Set them in the OPTIONS of that database, as docs/sql.md says.",
        )


def _ask(store: Store) -> list[Finding]:
    """Ask the store for a record, which needs no more rights than a worker has, and the servers about themselves."""
    try:
        missing = store.missing_rights()
        if not missing:
            store.get(_UNUSED)
    except StoreUnavailable as error:
        return [
            Finding(
                id="E006",
                problem=f"The store does not answer, and no idempotent task runs: {error}",
                hint="Start it, or let idempotency_store say where it is.",
            )
        ]
    except StoreMisconfigured as error:
        return [
            Finding(
                id="E006",
                problem=f"The store cannot be used: {error}",
                hint="Set it up as docs/running.md says, or let idempotency_store name another.",
            )
        ]
    if missing:
        return [
            Finding(
                id="E006",
                problem=f"The store cannot be used: {store!r} refuses its user {', '.join(missing)}.",
                hint="Give the user the rights that docs/running.md lists.",
            )
        ]
    try:
        servers = store.facts()
    except IdempotencyError:
        return []  # the user may not ask
    # Of a cluster's servers, each finding once.
    return list({each.id: each for server in servers for each in _judge(server)}.values())


def _judge(server: ServerFacts) -> Iterator[Finding]:
    """Find what makes a server forget records: memory that is full, a restart, a failover."""
    name = f"{server.kind} {server.version}"
    oldest = _OLDEST[server.kind]
    if server.release < oldest:
        yield Finding(
            id="E007",
            problem=f"{name} is too old to keep records.",
            hint=f"Use {server.kind} {'.'.join(map(str, oldest))} or newer.",
        )
    if server.eviction != "noeviction":
        yield Finding(
            id="W008",
            problem=f"{name} deletes keys when its memory is full (maxmemory-policy {server.eviction}): a task whose"
            " record was evicted runs again.",
            hint="Set maxmemory-policy noeviction, or keep records in a Redis of their own.",
        )
    if server.persistent is False:
        yield Finding(
            id="W009",
            problem=f"{name} writes nothing to disk: after a restart, everything that was completed runs again.",
            hint="Set appendonly yes, with appendfsync everysec or always.",
        )
