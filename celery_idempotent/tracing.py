"""What became of a call, on the OpenTelemetry span that it happens in: attributes and one event an outcome.

``pip install 'celery-idempotent[opentelemetry]'``, then where the app is made::

    from celery_idempotent import tracing

    tracing.install()

The span is the one that is current: that of ``opentelemetry-instrumentation-celery`` around a run or a publishing, that
of your web framework around a request. No span has a key: a digest tells whether two spans are about the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_idempotent.events import facts
from celery_idempotent.signals import OUTCOMES, OutcomeSignal

try:
    from opentelemetry import trace
except ImportError as error:
    raise ImportError(
        "celery_idempotent.tracing needs opentelemetry-api: pip install 'celery-idempotent[opentelemetry]'"
    ) from error

if TYPE_CHECKING:
    from celery_idempotent.signals import Event

__all__ = ["install"]


def install() -> None:
    """Write outcomes to the current span, in this process and those that it forks. To call it again changes nothing."""
    for name, outcome in OUTCOMES.items():
        outcome.connect(_noting(outcome), weak=False, dispatch_uid=f"{__name__}.{name}")


def _noting(outcome: OutcomeSignal) -> Callable[..., None]:
    def note(event: Event, **_: object) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        found = facts(outcome, event)
        key = [str(found.pop(name, "")) for name in ("namespace", "scope", "key")]
        if event.identity is not None:
            digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
            found |= {"namespace": key[0], "key_digest": digest[:16]}
        attributes = {
            f"celery.idempotency.{name}": value
            for name, value in found.items()
            if name not in ("task_id", "who")
        }
        span.set_attributes(attributes)
        span.add_event(f"idempotency.{outcome.counter}", attributes)

    return note
