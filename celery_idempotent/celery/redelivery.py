"""How long a broker waits for the acknowledgement of a message before it delivers that again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True, kw_only=True)
class RedeliveryTimeout:
    """``option`` is the transport's option for it. A dead worker's message comes again after ``seconds``."""

    option: str
    seconds: float


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


def redelivery_timeout(app: Celery) -> RedeliveryTimeout | None:
    """Return how long the broker that the app reads from waits, ``None`` if it redelivers at once or never."""
    url = cast("object", app.conf.broker_read_url)  # its stub knows one URL only
    first = url[0] if isinstance(url, (list, tuple)) and url else url
    scheme = str(first or "").partition("://")[0].partition("+")[0].lower()
    if scheme not in _TRANSPORTS:
        return None
    option, default = _TRANSPORTS[scheme]
    options = app.conf.broker_transport_options or {}
    try:
        seconds = float(options.get(option) or default)  # may be text, as in the query of a URL
    except (TypeError, ValueError):
        seconds = default  # kombu refuses it
    return RedeliveryTimeout(option=option, seconds=seconds)
