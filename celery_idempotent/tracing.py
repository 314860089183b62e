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
from typing import TYPE_CHECKING, Final

from celery_idempotent.events import OUTCOMES, facts

try:
    from opentelemetry import trace
except ImportError as error:
    raise ImportError(
        "celery_idempotent.tracing needs opentelemetry-api: pip install 'celery-idempotent[opentelemetry]'"
    ) from error

if TYPE_CHECKING:
    from celery_idempotent.records import Identity
    from celery_idempotent.signals import Event

__all__ = ["install"]

_PREFIX: Final = "celery.idempotency."


def install() -> None:
    """Write outcomes to the current span, in this process and those that it forks. To call it again changes nothing."""
    for signal, (outcome, _) in OUTCOMES.items():
        signal.connect(_noting(outcome), weak=False, dispatch_uid=f"{__name__}.{outcome}")


def _noting(outcome: str) -> Callable[..., None]:
    def note(event: Event, **_: object) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        attributes = _attributes(outcome, event)
        span.set_attributes(attributes)
        span.add_event(f"idempotency.{outcome}", attributes)

    return note


def _attributes(outcome: str, event: Event) -> dict[str, str | int | bool]:
    found = facts(outcome, event)
    if event.identity is not None:
        found["key_digest"] = _digest(event.identity)
    return {_PREFIX + name: value for name, value in found.items()}


def _digest(identity: Identity) -> str:
    """Return 64 bits of SHA-256 over namespace, scope and key."""
    parts = (identity.namespace, identity.scope, identity.key)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
