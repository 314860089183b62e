"""Checks of what the broker does to messages: acknowledgement, redelivery, and the messages that start sweeps.

Why a visibility timeout should be longer than the lease (W004), here 30 s and 60 s::

    worker A   claim ─ ✗ killed
    broker              30 s: delivers it again       60 s: the lease ends
    worker B                    Held: republished, again and again ─ claim: runs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.app.routes import Router

from celery_idempotent.celery.checks.finding import Finding, Tasks, named
from celery_idempotent.celery.reaper import SWEEP
from celery_idempotent.celery.redelivery import redelivery_timeout

if TYPE_CHECKING:
    from celery import Celery

#: How many seconds workers have to answer.
_ANSWER = 1


def acks_late(_app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks that a crash loses. In mode "observe" a task is acknowledged as without us."""
    early = [
        name
        for name, (task, each) in tasks.items()
        if not task.acks_late and each.policy.mode == "enforce"
    ]
    if early:
        yield Finding(
            id="W002",
            problem=f"Acknowledged before they run, and so lost with a worker that dies: {named(early)}.",
            hint="Leave acks_late to IdempotentTask, which sets it, or set it to True.",
        )


def scheduled_sweep(app: Celery, _tasks: Tasks) -> Iterator[Finding]:
    """Find out whether sweeps are scheduled."""
    if app.conf.get("idempotency_sweep_interval", 30) is not None:
        return
    if any(task == SWEEP for _, task, _ in _entries(app)):
        return
    yield Finding(
        id="W003",
        problem="No sweep is scheduled: claims of workers that died stay PROCESSING until their key is asked for"
        " again, and idempotency_on_stale does nothing.",
        hint=f"Set idempotency_sweep_interval, or run the task {SWEEP} every half minute.",
    )


def visibility(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find leases that are longer than the broker waits for an acknowledgement."""
    broker = redelivery_timeout(app)
    if broker is None:
        return
    most_ms = broker.seconds * 1000
    longer = [name for name, (_, each) in tasks.items() if each.policy.lease_ms >= most_ms]
    if longer:
        yield Finding(
            id="W004",
            problem=f"The {broker.option} ({broker.seconds:g} s) is not longer than the lease: after a crash the"
            f" message is delivered again and republished until the lease ends. Tasks: {named(longer)}.",
            hint=f"Set idempotency_lease below the {broker.option}, or that in broker_transport_options higher.",
        )


def waits(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find countdowns, as far as settings show them, that are longer than the broker waits for an acknowledgement."""
    broker = redelivery_timeout(app)
    if broker is None or broker.held is None:
        return
    found = [
        f"{name} (retries after up to {longest:g} s)"
        for name, (task, _) in tasks.items()
        if (longest := _longest_retry(task)) >= broker.held
    ]
    for name, task, options in _entries(app):
        countdown = options.get("countdown")
        if task in tasks and isinstance(countdown, (int, float)) and countdown >= broker.held:
            found.append(f"the beat entry {name} (countdown {countdown:g} s)")
    if found:
        yield Finding(
            id="W019",
            problem=f"A message that waits for longer than {broker.held:g} s ({broker.option}) is delivered again each"
            f" time that these pass: it runs once, but copies of it pile up. Affected: {named(found)}.",
            hint=f"Let them wait for less, or set the {broker.option} in broker_transport_options higher.",
        )


def sweep_queue(app: Celery, _tasks: Tasks) -> Iterator[Finding]:
    """Find out whether sweeps are sent to a queue that the app does not declare."""
    queue = _queue_of_sweeps(app)
    declared = app.conf.task_queues
    if queue is None or not declared:
        return
    names = declared if isinstance(declared, Mapping) else [each.name for each in declared]
    if queue not in names:
        yield _unswept(
            queue, "task_queues has no such queue, and so no worker consumes it by itself"
        )


def broadcast(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks that are routed to a fanout exchange, which gives each message to all of its queues."""
    queues: Any = app.amqp.queues
    fanouts = {name for name, queue in queues.items() if _is_fanout(queue)}
    fanouts |= {queues[name].exchange.name for name in fanouts}
    fanouts |= {alias for alias, queue in queues.aliases.items() if queue.name in fanouts}
    if not fanouts:
        return
    found: dict[bool, list[str]] = {}
    for name, (task, definition) in tasks.items():
        options = {each: getattr(task, each, None) for each in ("queue", "exchange")}
        route = _route(app, {each: value for each, value in options.items() if value}, name)
        if {route.get("exchange"), route.get("queue")} & fanouts:
            found.setdefault(definition.keyed, []).append(name)
    if unguarded := found.get(False):
        yield Finding(
            id="W023",
            problem="Published to a fanout exchange, without a key: each worker runs each message, and nothing is"
            f" guarded: {named(unguarded)}.",
            hint="Set idempotency_mode='off' if that is meant, or route the task to a queue with a direct exchange.",
        )
    if guarded := found.get(True):
        yield Finding(
            id="W023",
            problem="Published to a fanout exchange, with a key: one worker runs each message, and all others wait for"
            f" its result: {named(guarded)}.",
            hint="Route the task to a queue with a direct exchange, or if each worker shall run it, leave out the key.",
        )


def _is_fanout(queue: Any) -> bool:
    return queue.exchange is not None and queue.exchange.type == "fanout"


def consumers(app: Celery) -> list[Finding]:
    """Ask the workers that are up whether any of them consumes the queue that sweeps are sent to."""
    queue = _queue_of_sweeps(app)
    if queue is None or str(app.conf.broker_read_url).startswith("memory"):
        return []
    try:
        with app.connection_for_write(connect_timeout=_ANSWER) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=_ANSWER)
            inspect = app.control.inspect(timeout=_ANSWER, connection=connection)
            answers = inspect.active_queues() or {}
    except Exception:  # noqa: BLE001  # each transport has its own errors; that a broker is down shows without a check
        return []
    if not answers or any(
        queue == each["name"] for found in answers.values() for each in found or ()
    ):
        return []
    return [_unswept(queue, f"none of the {len(answers)} worker(s) that answered consumes it")]


def _unswept(queue: str, why: str) -> Finding:
    return Finding(
        id="W022",
        problem=f"Sweeps are sent to the queue {queue}: {why}. Then claims of workers that died stay PROCESSING until"
        " their key is asked for again, and the messages pile up.",
        hint=f"Start a worker with -Q {queue}, or route {SWEEP} to a queue that is consumed.",
    )


class _AnyQueue(dict[str, object]):
    """Stands in for ``app.amqp.queues``, which would add each queue that is looked up, and consume it from then on."""

    def __missing__(self, name: str) -> object:
        return SimpleNamespace(name=name)


def _queue_of_sweeps(app: Celery) -> str | None:
    """Return the queue that beat sends sweeps to; ``None`` if it sends none, or if only the broker decides."""
    options = next((about for _, task, about in _entries(app) if task == SWEEP), None)
    if options is None or {"exchange", "routing_key"} & set(options):
        return None
    route = _route(app, options, SWEEP)
    return None if "exchange" in route else route.get("queue")


def _route(app: Celery, options: Mapping[str, object], name: str) -> dict[str, str]:
    """Return the names of the queue and the exchange that a call is sent to, as far as settings say them."""
    try:
        router: Any = Router(app.amqp.routes, _AnyQueue(), create_missing=True, app=app)
        route = router.route(dict(options), name, task_type=app.tasks.get(name))
    except Exception:  # noqa: BLE001  # the project's own routers may raise what they like
        return {}
    found = {each: route[each] for each in ("queue", "exchange") if route.get(each)}
    return {each: str(getattr(value, "name", value)) for each, value in found.items()}


def _longest_retry(task: Task[..., object]) -> float:
    """Return the longest countdown, in seconds, that the task's options lead to; 0 where they name none."""
    if not getattr(task, "autoretry_for", ()):
        own: float | None = task.default_retry_delay
        return float(own) if own and own != Task.default_retry_delay else 0.0
    given = getattr(task, "retry_kwargs", None) or {}
    backoff = float(getattr(task, "retry_backoff", False))
    if not backoff:
        return float(given.get("countdown", task.default_retry_delay) or 0)
    longest = float(getattr(task, "retry_backoff_max", 600))
    retries = given.get("max_retries", task.max_retries)
    if retries is None:
        return longest
    last: float = int(max(1.0, backoff)) * 2.0 ** min(retries - 1, 64)
    return min(longest, last)


def _entries(app: Celery) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield name, task and options of each entry in beat's schedule."""
    for name, entry in (app.conf.beat_schedule or {}).items():
        about = entry if isinstance(entry, dict) else vars(entry)  # or a ScheduleEntry
        yield str(name), str(about.get("task")), about.get("options") or {}
