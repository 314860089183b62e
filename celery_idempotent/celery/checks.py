"""Checks of an app, its store and its broker; a worker that starts logs the findings."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from celery_idempotent.celery.definition import Definition, load_tasks, loaded
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured
from celery_idempotent.protocol.atomic import transactional
from celery_idempotent.records import Identity
from celery_idempotent.settings import PREFIX
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can go wrong; ``id`` begins with E where tasks will not run, else with W."""

    id: str
    problem: str
    hint: str

    @property
    def level(self) -> Literal["error", "warning"]:
        """The letter of the id as a word."""
        return "error" if self.id.startswith("E") else "warning"


#: Each finding: its id and problem, then a hint.
_TEXTS: Final = """
E001 No worker starts: {error}
     Correct the option that it names; for any other error, import the app's tasks in a shell.
W002 Tasks are acknowledged before they run, so a worker that dies loses them: {tasks}.
     Leave acks_late to IdempotentTask, which sets it, or set it to True.
W003 No sweep is scheduled: claims of dead workers stay PROCESSING, and idempotency_on_stale does nothing.
     Set idempotency_sweep_interval, or run the task celery_idempotent.sweep every half minute.
W004 After a crash, messages come back before the lease ends ({broker.option}: {broker.seconds:g} s): {tasks}.
     Set idempotency_lease below the {broker.option}, or raise that in broker_transport_options.
W005 The store is in the memory of each process: processes do not see each other's keys.
     Set idempotency_store to a Redis or a database; memory:// is for tests.
E006 The store cannot be used, and no idempotent task runs: {error}
     Start it, make room in it, give its user the rights of docs/running.md, or set idempotency_store to another.
E007 {server.kind} {server.version} is too old.
     Use Redis 6.2, Valkey 7.2 or newer.
W008 {server.kind} evicts records when memory is full (maxmemory-policy {server.eviction}): their tasks run again.
     Set maxmemory-policy noeviction, or keep records in a Redis of their own.
W009 {server.kind} writes nothing to disk: after a restart, completed operations may run again.
     Set appendonly yes, with appendfsync everysec or always.
W023 A fanout exchange gives each message to many workers, but one runs a task with a key: {tasks}.
     Route the task to a queue with a direct exchange, or set idempotency_mode='off' if each worker should run it.
W024 django-tenants is installed, and all tenants share the keys of these tasks: {tasks}.
     Set idempotency_scope so that it names the tenant, as docs/recipes.md says.
W025 SQLite cannot end a frozen worker's transaction, and nobody else writes until its process is gone: {tasks}.
     Keep the database of atomic tasks in PostgreSQL, MariaDB or MySQL.
W026 Atomic tasks are committed in {store!r}, and Django writes every model to another database: {tasks}.
     Set idempotency_store to the database of their models, or route those to it by DATABASE_ROUTERS.
W027 These tasks have idempotency options, which do nothing, because IdempotentTask is not their base: {tasks}.
     Set base=IdempotentTask on each, or task_cls="celery_idempotent:IdempotentTask" on the app.
"""

#: The oldest releases that have the commands that the store uses.
_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}


def check(app: AnyCelery) -> list[Finding]:
    """Return all findings about an app; import its tasks, and ask its store."""
    return [*check_settings(app), *check_store(app)]


def check_settings(app: AnyCelery) -> list[Finding]:
    """Return the findings about the app and its settings, without asking a server; import its tasks."""
    store, tasks, errors = _open(app)
    plain = [t for _, t in sorted(app.tasks.items()) if not hasattr(t, "idempotency_definition")]
    unguarded = [t for t in plain if any(name.startswith(PREFIX) for name in dir(t))]
    if store is None:
        return [*errors, *_findings({"W027": unguarded})]
    broker = redelivery_timeout(app)
    beats: Iterable[Any] = (app.conf.beat_schedule or {}).values()
    swept = [each["task"] if isinstance(each, dict) else each.task for each in beats]
    has_tenants = "django_tenants" in sys.modules  # Django imports each app that is installed
    enforced = [each for each in tasks if each.policy.mode == "enforce"]
    atomic = [each for each in tasks if each.policy.atomic]
    found = {
        "W002": [each for each in enforced if not app.tasks[each.name].acks_late],
        "W003": app.conf.get("idempotency_sweep_interval", 30) is None and SWEEP not in swept,
        "W004": [t for t in tasks if broker and t.policy.lease_ms >= broker.seconds * 1000],
        "W005": type(store).__name__ == "MemoryStore",
        "W023": _find_broadcast(app, tasks),
        "W024": [each for each in tasks if has_tenants and each.keyed and not each.scoped],
        "W027": unguarded,
        **dict.fromkeys(store.atomic_findings() if atomic else (), atomic),
    }
    return _findings(found, broker=broker, store=store)


def _find_broadcast(app: AnyCelery, tasks: Iterable[Definition]) -> list[Definition]:
    """Return the tasks that are routed to a fanout exchange."""
    queues: Iterable[Any] = app.amqp.queues.values()
    fanouts = [each for each in queues if each.exchange and each.exchange.type == "fanout"]
    names = {name for each in fanouts for name in (each.name, each.alias, each.exchange.name)}
    found = []
    for each in tasks if fanouts else ():
        task: Any = app.tasks[each.name]
        route: Any = {}
        with suppress(Exception):  # of a router of the project
            route = app.amqp.router.lookup_route(each.name, (), {}, {}, task) or {}
        targets = [getattr(task, name, None) or route.get(name) for name in ("queue", "exchange")]
        if names & {getattr(target, "name", target) for target in targets if target}:
            found.append(each)
    return found


def check_store(app: AnyCelery) -> list[Finding]:
    """Return the findings about the store and its servers."""
    store, _, _ = _open(app)  # its errors are findings of check_settings()
    if store is None:
        return []
    try:
        if missing := ", ".join(store.missing_rights()):
            raise StoreMisconfigured(f"{store!r} refuses its user {missing}.")
        # No task has such a name. Neither read nor write needs more rights than a worker has.
        store.get(Identity(namespace="celery_idempotent:check", key="-"))
        store.probe()
    except IdempotencyError as error:
        return _findings({"E006": True}, error=error)
    found: dict[str, Finding] = {}  # of a cluster's servers, each finding once
    with suppress(IdempotencyError):  # the user may not ask
        for server in store.facts():
            wrong = {
                "E007": server.release < _OLDEST[server.kind],
                "W008": server.eviction != "noeviction",
                "W009": server.persistent is False,
            }
            found |= {each.id: each for each in _findings(wrong, server=server)}
    return list(found.values())


def _findings(found: Mapping[str, object], **words: object) -> list[Finding]:
    """Return a finding for each id with a true value; the text names the tasks of a list."""
    made = []
    for name, problem, hint in re.findall(r"(\w+) (.+)\n +(.+)\n", _TEXTS):
        if value := found.get(name):
            if isinstance(value, list):
                words["tasks"] = ", ".join(each.name for each in value)
            texts = {"problem": problem.format_map(words), "hint": hint.format_map(words)}
            made.append(Finding(id=name, **texts))
    return made


def _open(app: AnyCelery) -> tuple[Store | None, list[Definition], list[Finding]]:
    """Import the app's tasks; return its store and its tasks, or no store and the error."""
    try:
        load_tasks(app)
        return *check_or_raise(app), []
    except Exception as error:  # noqa: BLE001  a module of the project may raise anything
        # Any other text may contain a secret, such as a password.
        text = f": {error}" if isinstance(error, (IdempotencyError, ImportError)) else ""
        whole = f"{type(error).__name__}{text}".removesuffix(".")
        return None, [], _findings({"E001": True}, error=f"{whole}.")


def check_or_raise(app: AnyCelery) -> tuple[Store | None, list[Definition]]:
    """Return the store (``None`` if no task needs one) and the tasks that are not switched off.

    Raises:
        IdempotencyError: for a bad option, a missing store, or an atomic task whose store has no transactions.
    """
    # A task with bad options is registered without a definition: the call makes it.
    known = [getattr(task, "idempotency_definition", None) for _, task in sorted(app.tasks.items())]
    tasks = [made for find in known if find is not None and (made := find()) is not None]
    if not tasks:
        return None, []
    store = get_store(app)
    store.joined()  # reads the settings of a database
    for each in tasks:
        if each.policy.atomic:
            transactional(store, each.name)
    return store, tasks


def check_in_thread(app: AnyCelery) -> None:
    """Log the findings of a worker, which has imported the app's tasks.

    From a daemon thread: a silent server must delay neither the worker's first message nor its end.
    """
    loaded.add(app)

    def log_findings() -> None:
        try:
            for look in (check_settings, check_store):  # first those that need no server
                for each in look(app):
                    level = logging.ERROR if each.level == "error" else logging.WARNING
                    text = f"{each.problem.rstrip('.')}. {each.hint}"
                    extra = {"idempotency_finding": each.id}
                    logger.log(level, "idempotency: %s %s", each.id, text, extra=extra)
        except Exception:
            logger.warning("idempotency: the checks failed", exc_info=True)

    threading.Thread(target=log_findings, name="celery-idempotent-checks", daemon=True).start()
