"""Checks how an app, its store and its broker are set up for idempotent tasks, before something goes wrong.

Each finding has an id that never changes, the problem, and a hint what to set. By what is asked for them there are::

    check_settings   the app alone, without any server
    check_store      the store and its servers
    check_workers    the workers that are up: does one of them consume the queue of the sweeps?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.celery.checks import broker, formats, servers, tenants
from celery_idempotent.celery.checks.finding import Finding, Tasks
from celery_idempotent.celery.registry import load_tasks
from celery_idempotent.errors import IdempotencyError, InvalidOption
from celery_idempotent.protocol.atomic import transactional
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery

__all__ = ["Finding", "check", "check_or_raise", "check_settings", "check_store", "check_workers"]

_OF_SETTINGS = (
    broker.acks_late,
    broker.broadcast,
    broker.scheduled_sweep,
    broker.sweep_queue,
    broker.visibility,
    broker.waits,
    formats.known,
    formats.accepted,
    formats.pickled,
    tenants.unscoped,
)


def check(app: AnyCelery) -> list[Finding]:
    """Return all findings about an app: it imports its tasks, and asks the store and the workers that are up."""
    return [*check_settings(app), *check_store(app), *check_workers(app)]


def check_settings(app: AnyCelery) -> list[Finding]:
    """Return what can be found without asking any server, once all of the app's tasks are imported."""
    try:
        load_tasks(app)
    except InvalidOption as error:
        return [_bad_option(error)]
    except Exception as error:  # noqa: BLE001  # a module of the project may raise anything
        # Only an ImportError's text is shown: any other may contain a secret, a connection's password for instance.
        said = f": {error}" if isinstance(error, ImportError) else ""
        return [
            Finding(
                id="E021",
                problem=f"The app's tasks cannot be imported ({type(error).__name__}{said}): no worker starts.",
                hint="Import them in a shell to see where that comes from.",
            )
        ]
    try:
        tasks = _tasks(app)
    except InvalidOption as error:
        return [_bad_option(error)]
    if not tasks:
        return []
    try:
        store = get_store(app)
        unbounded = list(servers.unbounded_waits(store))  # reads the settings of a database
    except IdempotencyError as error:
        hint = "Set idempotency_store to a URL or a store; a worker does not start like this."
        return [Finding(id="E001", problem=str(error), hint=hint)]
    found: list[Finding] = []
    for each in _OF_SETTINGS:
        found.extend(each(app, tasks))
    found.extend(servers.in_memory(store))
    found.extend(unbounded)
    return found


def check_store(app: AnyCelery) -> list[Finding]:
    """Return what the store and its servers answer."""
    try:
        load_tasks(app)
        if not _tasks(app):
            return []
        store = get_store(app)
        list(servers.unbounded_waits(store))
    except Exception:  # noqa: BLE001  # reported as E001, E013 or E021
        return []
    return list(servers.answers(store))


def check_workers(app: AnyCelery) -> list[Finding]:
    """Return what the workers that are up answer, within a second or two; nothing where none is up."""
    try:
        load_tasks(app)
        if not _tasks(app):
            return []
        if "W022" in {each.id for each in broker.sweep_queue(app, {})}:
            return []  # reported already
        return list(broker.consumers(app))
    except Exception:  # noqa: BLE001  # reported as E013 or E021
        return []


def _bad_option(error: InvalidOption) -> Finding:
    hint = "Set it to what is allowed; a worker does not start like this."
    return Finding(id="E013", problem=str(error), hint=hint)


def check_or_raise(app: Celery) -> None:
    """Check, without asking any server, what no task can run without.

    Raises:
        IdempotencyError: if an option is bad, if there is no store, or if a task is atomic and the store knows no
            transactions.
    """
    tasks = _tasks(app)
    if not tasks:
        return
    store = get_store(app)
    list(servers.unbounded_waits(store))
    for name, (_, definition) in tasks.items():
        if definition.policy.atomic:
            transactional(store, name)


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
