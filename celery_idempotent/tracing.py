"""Outcomes on the current OpenTelemetry span: attributes, and one event for each.

The span is the current one, of ``opentelemetry-instrumentation-celery`` or of your web framework. No span has a key.
"""

from __future__ import annotations

import hashlib

from celery_idempotent.signals import OUTCOMES, Event, OutcomeSignal, facts

try:
    from opentelemetry import trace
except ImportError as error:
    raise ImportError(
        "celery_idempotent.tracing needs opentelemetry-api: pip install 'celery-idempotent[opentelemetry]'"
    ) from error

__all__ = ["install"]


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
    known = found.keys() - {"key", "scope", "task_id", "who"}
    attributes = {f"celery.idempotency.{name}": found[name] for name in known}
    span.set_attributes(attributes)
    span.add_event(f"idempotency.{signal.counter}", attributes)
