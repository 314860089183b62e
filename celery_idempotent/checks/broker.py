"""What the broker does to messages: acknowledgement, redelivery, and who asks for sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery import Task

from celery_idempotent.checks.finding import Finding, Tasks, named
from celery_idempotent.reaper import SWEEP

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["acks_late", "sweep", "visibility", "waits"]

#: What Celery's transports redeliver after, in seconds, if nothing else is set.
_VISIBILITY = {"redis": 3600, "rediss": 3600, "sentinel": 3600, "sqs": 1800}


def acks_late(_app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find tasks that a crash loses."""
    early = [name for name, (task, _) in tasks.items() if not task.acks_late]
    if early:
        yield Finding(
            id="W002",
            problem=f"Acknowledged before they run, and so lost with a worker that dies: {named(early)}.",
            hint="Leave acks_late to IdempotentTask, which sets it, or set it to True.",
        )


def sweep(app: Celery, _tasks: Tasks) -> Iterator[Finding]:
    """Find out whether anybody asks for sweeps."""
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
    """Find leases that outlast the broker's patience."""
    timeout = _visibility_timeout(app)
    if timeout is None:
        return
    longer = [name for name, (_, each) in tasks.items() if each.policy.lease_ms >= timeout * 1000]
    if longer:
        yield Finding(
            id="W004",
            problem=f"The broker delivers again after {timeout:g} s (visibility_timeout), before the lease of a dead"
            f" worker is over: the message circles as long. Tasks: {named(longer)}.",
            hint="Set idempotency_lease below the visibility_timeout, or that in broker_transport_options higher.",
        )


def waits(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find countdowns that outlast the broker's patience, as far as settings tell them."""
    timeout = _visibility_timeout(app)
    if timeout is None:
        return
    found = [
        f"{name} (retries after up to {longest:g} s)"
        for name, (task, _) in tasks.items()
        if (longest := _longest_retry(task)) >= timeout
    ]
    for name, task, options in _entries(app):
        countdown = options.get("countdown")
        if task in tasks and isinstance(countdown, (int, float)) and countdown >= timeout:
            found.append(f"the beat entry {name} (countdown {countdown:g} s)")
    if found:
        yield Finding(
            id="W019",
            problem=f"A message that waits for longer than {timeout:g} s (visibility_timeout) is delivered again each"
            f" time that these pass: it runs once, but is many by then. So waits: {named(found)}.",
            hint="Let them wait for less, or set the visibility_timeout in broker_transport_options higher.",
        )


def _longest_retry(task: Any) -> float:
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


def _visibility_timeout(app: Celery) -> float | None:
    """Return after how many seconds the broker delivers again what nobody acknowledged, if it does."""
    url: Any = app.conf.broker_read_url
    first = url[0] if isinstance(url, (list, tuple)) and url else url
    scheme = str(first or "").partition("://")[0].partition("+")[0]
    if scheme not in _VISIBILITY:
        return None
    options = app.conf.broker_transport_options or {}
    timeout: object = options.get("visibility_timeout", _VISIBILITY[scheme])
    return float(timeout) if isinstance(timeout, (int, float)) else None


def _entries(app: Celery) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, task and options of what beat is to send."""
    for name, entry in (app.conf.beat_schedule or {}).items():
        about = entry if isinstance(entry, dict) else vars(entry)  # or a ScheduleEntry
        yield str(name), str(about.get("task")), about.get("options") or {}
