"""Metrics for Prometheus: outcomes from our signals, and gauges that ask the store when they are scraped.

docs/operating.md lists them, with a worker that serves them. Counter and histogram belong to this process (with
PROMETHEUS_MULTIPROC_DIR, to all children of a worker), the gauges to the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args

from celery.signals import worker_process_shutdown, worker_ready

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.settings import real_app
from celery_idempotent.signals import OUTCOMES, Event, OutcomeSignal
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import Health, Problem

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "celery_idempotent.metrics needs prometheus_client: pip install 'celery-idempotent[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery

__all__ = ["StoreCollector", "install", "serve"]

logger = logging.getLogger(__name__)

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)

#: The store's gauges, and what each says.
GAUGES: Final = {
    "store_up": "1 if the store answered this scrape and took a write, else 0.",
    "store_problem": "Why store_up is 0: down (no answer), refused (rights, settings), read-only (full, a replica).",
    "store_since_seconds": "When the store was first used; it grows when the store loses its data.",
    "records": "Unfinished and failed records; live and stale ones are PROCESSING or QUEUED.",
    "last_sweep_age_seconds": "How long ago the last sweep ended.",
    "outbox_messages": "Messages in the outbox.",
    "outbox_age_seconds": "How long the oldest message has waited in the outbox, or 0.",
}
STATES: Final = ("live", "stale", "interrupted", "failed")
LABELS: Final = {"store_problem": "problem", "records": "state"}


@cache
def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count and time outcomes in this process and its forks; call it where the app is made."""
    counter = Counter(
        "celery_idempotency_outcomes",
        "Outcomes; observed=true: what would have happened, in mode observe.",
        ("task", "outcome", "state", "error", "observed"),
        registry=registry,
    )
    histogram = Histogram(
        "celery_idempotency_seconds",
        "Time to claim, or to settle with an atomic COMMIT; of duplicates, how long they held their worker.",
        ("task", "outcome"),
        buckets=BUCKETS_S,
        registry=registry,
    )

    def count(signal: OutcomeSignal, event: Event, **_: object) -> None:
        counter.labels(
            task=event.task,
            outcome=signal.counter,
            state="" if event.state is None else event.state.value,
            error="" if event.error is None else type(event.error).__name__,
            observed=str(event.observed).lower(),
        ).inc()
        if event.seconds is not None:
            histogram.labels(event.task, signal.counter).observe(event.seconds)

    for outcome in OUTCOMES.values():
        outcome.connect(count, weak=False)


def serve(app: AnyCelery, port: int, *, addr: str = "0.0.0.0") -> None:  # noqa: S104  as prometheus_client does
    """Count outcomes, and serve them with the store's metrics from each worker of ``app``, whatever its pool.

    The processes of a prefork pool need PROMETHEUS_MULTIPROC_DIR, a directory of this worker's own, empty at its start.
    """
    install()
    of_processes = "PROMETHEUS_MULTIPROC_DIR" in os.environ

    def start(sender: Any, **_: object) -> None:
        if sender.app is not real_app(app):
            return
        if sender.pool.uses_semaphore and not of_processes:  # prefork
            logger.warning("idempotency: no outcomes in metrics: set PROMETHEUS_MULTIPROC_DIR")
        registry = REGISTRY
        if of_processes:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(StoreCollector(app))
        start_http_server(port, addr, registry)

    worker_ready.connect(start, weak=False)
    if of_processes:
        worker_process_shutdown.connect(lambda pid, **_: mark_process_dead(pid), weak=False)  # type: ignore[no-untyped-call]


class StoreCollector(Collector):
    """Gauges of an app's store: each scrape takes a few bounded requests, however many records there are."""

    def __init__(self, app: AnyCelery) -> None:
        self._app = app

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; if the store does not answer, only that."""
        for name, value in self._ask().items():
            labels = [LABELS[name]] if name in LABELS else []
            family = GaugeMetricFamily(f"celery_idempotency_{name}", GAUGES[name], labels=labels)
            for label, number in (value if isinstance(value, dict) else {"": value}).items():
                family.add_metric([label] if labels else [], number)
            yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield nothing, so that the registration of a collector does not ask the store."""
        return iter(())

    def _ask(self) -> dict[str, float | dict[str, float]]:
        """Return the values by name; ages are by the store's clock, not by this machine's."""
        try:
            health = get_store(self._app).health()
        except IdempotencyError as error:
            health = Health("refused", error)
        if health.error is not None:
            logger.warning("idempotency: the store is %s: %s", health.problem, health.error)
        found: dict[str, float | dict[str, float]] = {"store_up": not health.problem}
        found["store_problem"] = {each: each == health.problem for each in get_args(Problem)}
        if (stats := health.stats) is None:
            return found
        if stats.swept_ms is not None:
            found["last_sweep_age_seconds"] = max(stats.now_ms - stats.swept_ms, 0) / 1000
        if health.mark:
            found["store_since_seconds"] = abs(health.mark) / 1000
        return found | {
            "records": {each: getattr(stats, each) for each in STATES},
            "outbox_messages": stats.outbox,
            "outbox_age_seconds": max(stats.outbox_ms or 0, 0) / 1000,
        }
