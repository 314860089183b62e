"""How long a broker waits for the acknowledgement of a message before it delivers that again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from celery_idempotent.celery.typed import Options

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True, kw_only=True)
class RedeliveryTimeout:
    """``option`` is the transport's option for it. A dead worker's message comes again after ``seconds``.

    A live worker's message comes again after ``held`` seconds; ``None``: never, since the worker renews it.

    ::

        Redis       seconds 3600, held 3600    a task of two hours is delivered to a second worker after one
        Pub/Sub     seconds 240, held None     a live worker extends the deadline; a dead one's message comes in 240 s
    """

    option: str
    seconds: float
    held: float | None


#: Of kombu's transports: the option, and its default. Those that are missing notice that a connection is gone, or (as
#: Azure's Storage Queues) delete a message when they receive it, and deliver none again.
_TRANSPORTS = {
    "redis": ("visibility_timeout", 3600.0),
    "rediss": ("visibility_timeout", 3600.0),
    "sentinel": ("visibility_timeout", 3600.0),
    "sqs": ("visibility_timeout", 1800.0),
    "pgmq": ("visibility_timeout", 1800.0),
    "gcpubsub": ("ack_deadline_seconds", 240.0),
    "azureservicebus": ("peek_lock_seconds", 60.0),
}

#: For so long Azure's client renews what a worker holds, where it does.
_AZURE_RENEWS = 3600.0


def redelivery_timeout(app: Celery) -> RedeliveryTimeout | None:
    """Return how long the broker that the app reads from waits, ``None`` if it redelivers at once or never."""
    url = cast("object", app.conf.broker_read_url)  # its stub knows one URL only
    first = url[0] if isinstance(url, (list, tuple)) and url else url
    scheme = str(first or "").partition("://")[0].partition("+")[0].lower()
    if scheme not in _TRANSPORTS:
        return None
    option, default = _TRANSPORTS[scheme]
    options = app.conf.broker_transport_options or {}
    seconds = _seconds(options, option, default)
    held: float | None = seconds
    if scheme == "gcpubsub":
        held = None  # a thread of the worker extends the deadlines of all that it holds
    elif scheme == "azureservicebus" and options.get("use_lock_renewal"):
        held = max(seconds, _seconds(options, "max_lock_renewal_duration", _AZURE_RENEWS))
    return RedeliveryTimeout(option=option, seconds=seconds, held=held)


def _seconds(options: Options, name: str, default: float) -> float:
    """Return a number that may be written as a text, as in the query of a URL; what is none is for kombu to refuse."""
    try:
        return float(options.get(name) or default)
    except (TypeError, ValueError):
        return default
