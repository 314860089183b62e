"""Outcomes on the current OpenTelemetry span: attributes, and one event for each.

An event is a log record with an event name where the application configures OpenTelemetry's logs, else an event of the
span, a form that OpenTelemetry deprecates. The span is the current one, of ``opentelemetry-instrumentation-celery`` or
of your web framework. Neither has a key.
"""

from __future__ import annotations

import hashlib
from typing import Any

from celery_idempotent import signals
from celery_idempotent.signals import OUTCOMES, Event, OutcomeSignal, facts

try:
    from opentelemetry import _logs, trace
except ImportError as error:
    raise ImportError(
        "celery_idempotent.tracing needs opentelemetry-api: pip install 'celery-idempotent[opentelemetry]'"
    ) from error

__all__ = ["install"]

_events: Any = _logs.get_logger("celery_idempotent")


def install() -> None:
    """Write outcomes to the current span, in this process and its forks. Calling it again changes nothing."""
    for name, outcome in OUTCOMES.items():
        outcome.connect(_note, weak=False, dispatch_uid=f"{__name__}.{name}")


def _note(signal: OutcomeSignal, event: Event, **_: object) -> None:
    span = trace.get_current_span()
    if not span.is_recording():
        return
    found = facts(signal, event)
    if (identity := event.identity) is not None:
        parts = "\0".join((identity.namespace, identity.scope, identity.key))
        found["key_digest"] = hashlib.sha256(parts.encode()).hexdigest()[:16]
    if signal is signals.replayed and event.record is not None:
        found["state"] = event.record.state.value
    known = found.keys() - {"key", "scope", "task_id", "who", "error"}
    attributes = {f"celery.idempotency.{name}": found[name] for name in known}
    if event.error is not None:
        name = f"{(kind := type(event.error)).__module__}.{kind.__qualname__}"
        attributes["error.type"] = name.removeprefix("builtins.")
    name = f"celery.idempotency.{signal.counter}"
    if getattr(_events, "enabled", lambda **_: False)(event_name=name):
        _events.emit(event_name=name, attributes=attributes)
    else:
        span.add_event(name, attributes)
    # A span says how its operation ended.
    passing = {signals.claimed: "celery.idempotency.state", signals.store_failed: "error.type"}.get(
        signal
    )
    span.set_attributes({name: attributes[name] for name in attributes if name != passing})
