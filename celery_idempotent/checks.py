"""Looking for what may go wrong before it does: how an app, its store and its broker are set up for idempotent tasks.

Each finding has an id that stays, says what can go wrong, and what to set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from celery_idempotent.definition import Definition
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.reaper import SWEEP
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores import Store

__all__ = ["Finding", "check", "check_settings", "check_store"]

#: What Celery's transports redeliver after, in seconds, if nothing else is set.
_VISIBILITY = {"redis": 3600, "rediss": 3600, "sentinel": 3600, "sqs": 1800}

#: The oldest releases that can keep records.
_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}

#: So many names a finding lists.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can go wrong. ``id`` begins with E where tasks will not run, with W where they will."""

    id: str
    problem: str
    hint: str

    @property
    def level(self) -> Literal["error", "warning"]:
        """How bad it is."""
        return "error" if self.id.startswith("E") else "warning"


def check(app: Celery) -> list[Finding]:
    """Return all findings about an app; it looks at the store and at the servers behind it."""
    return [*check_settings(app), *check_store(app)]


def check_settings(app: Celery) -> list[Finding]:
    """Return what can be found without asking any server."""
    tasks = _tasks(app)
    if not tasks:
        return []
    try:
        store = get_store(app)
    except IdempotencyError as error:
        return [
            Finding(
                id="E001", problem=str(error), hint="Set idempotency_store to a URL or a store."
            )
        ]
    found: list[Finding] = []
    for each in (_acks_late, _sweep, _visibility):
        found.extend(each(app, tasks))
    found.extend(_memory(app, store))
    return found


def check_store(app: Celery) -> list[Finding]:
    """Return what the store and its servers say."""
    if not _tasks(app):
        return []
    try:
        store = get_store(app)
        store.stats()
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
    except IdempotencyError:
        return []  # E001 says it
    facts: Callable[[], Any] | None = getattr(store, "facts", None)
    if facts is None:
        return []
    try:
        servers = facts()
    except IdempotencyError as error:
        return [
            Finding(
                id="W011",
                problem=f"The store does not say how it is set up: {error}",
                hint="Allow its user the command INFO, or look yourself: eviction off, persistence on.",
            )
        ]
    waits = bool(getattr(store, "replicas", 0))
    # Of the servers of a cluster, each finding once.
    return list(
        {each.id: each for server in servers for each in _server(server, waits=waits)}.values()
    )


def _tasks(app: Celery) -> dict[str, tuple[Any, Definition]]:
    found = {}
    for name, task in sorted(app.tasks.items()):
        definition: Definition | None = getattr(task, "_definition", None)
        if definition is not None and not name.startswith("celery."):
            found[str(name)] = (task, definition)
    return found


def _acks_late(_app: Celery, tasks: dict[str, tuple[Any, Definition]]) -> Iterator[Finding]:
    early = [name for name, (task, _) in tasks.items() if not task.acks_late]
    if early:
        yield Finding(
            id="W002",
            problem=f"Acknowledged before they run, and so lost with a worker that dies: {_names(early)}.",
            hint="Leave acks_late to IdempotentTask, which sets it, or set it to True.",
        )


def _sweep(app: Celery, _tasks: dict[str, tuple[Any, Definition]]) -> Iterator[Finding]:
    if app.conf.get("idempotency_sweep_interval", 30) is not None:
        return
    if any(entry.get("task") == SWEEP for entry in (app.conf.beat_schedule or {}).values()):
        return
    yield Finding(
        id="W003",
        problem="No sweep is scheduled: claims of workers that died stay PROCESSING until their key is asked for"
        " again, and idempotency_on_stale does nothing.",
        hint=f"Set idempotency_sweep_interval, or run the task {SWEEP} every half minute.",
    )


def _visibility(app: Celery, tasks: dict[str, tuple[Any, Definition]]) -> Iterator[Finding]:
    scheme = str(app.conf.broker_url or "").partition("://")[0].partition("+")[0]
    if scheme not in _VISIBILITY:
        return
    options = app.conf.broker_transport_options or {}
    timeout = options.get("visibility_timeout", _VISIBILITY[scheme])
    if not isinstance(timeout, (int, float)):
        return
    longer = [name for name, (_, each) in tasks.items() if each.policy.lease_ms >= timeout * 1000]
    if longer:
        yield Finding(
            id="W004",
            problem=f"The broker delivers again after {timeout:g} s (visibility_timeout), before the lease of a dead"
            f" worker is over: the message circles as long. Tasks: {_names(longer)}.",
            hint="Set idempotency_lease below the visibility_timeout, or that in broker_transport_options higher.",
        )


def _memory(_app: Celery, store: Store) -> Iterator[Finding]:
    if type(store).__name__ == "MemoryStore":
        yield Finding(
            id="W005",
            problem="The store is the memory of each process: two processes know nothing of each other's keys.",
            hint="Set idempotency_store to a Redis or a database; memory:// is for tests.",
        )


def _server(server: Any, *, waits: bool) -> Iterator[Finding]:
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
    if server.replicas and not waits:
        yield Finding(
            id="W010",
            problem=f"{name} has {server.replicas} replica(s), and no claim waits for them: a failover may forget the"
            " last claims and results.",
            hint="Set idempotency_replicas to how many replicas a claim waits for.",
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
