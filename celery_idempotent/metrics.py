"""Metrics for Prometheus: outcomes from our signals, and gauges that ask the store when they are scraped.

docs/operating.md lists them, with a worker that serves them. Counter and histogram belong to this process (with
PROMETHEUS_MULTIPROC_DIR, to all children of a worker), the gauges to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Final

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Selection
from celery_idempotent.signals import OUTCOMES, Event, OutcomeSignal
from celery_idempotent.stores import get_store

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "celery_idempotent.metrics needs prometheus_client: pip install 'celery-idempotent[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery

__all__ = ["StoreCollector", "install"]

logger = logging.getLogger(__name__)

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
#: How many stale records are read, at most, to find the one that has been stale for longest.
LOOK_AT: Final = 500


@cache
def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Count and time outcomes in this process and its forks; call it where the app is made."""
    counter = Counter(
        "celery_idempotency_outcomes",
        "Outcomes of tasks, requests and records; observed=true: what would have happened, in mode observe.",
        ("task", "outcome", "state", "error", "observed"),
        registry=registry,
    )
    histogram = Histogram(
        "celery_idempotency_seconds",
        "How long the store took to claim, or to settle with the COMMIT of an atomic task. Of replayed, conflicted and "
        "mismatched: how long the duplicate held its worker.",
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


class StoreCollector(Collector):
    """Gauges of an app's store: each scrape takes two bounded requests, however many records there are."""

    def __init__(self, app: AnyCelery) -> None:
        self._app = app

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; if the store does not answer, only ``store_up`` with 0."""
        try:
            gauges = list(self._ask())
        except IdempotencyError as error:
            gauges = []
            logger.warning("idempotency: the store's metrics are missing from a scrape: %s", error)
        yield GaugeMetricFamily(
            "celery_idempotency_store_up",
            "1 if the store answered this scrape; else 0, and the metrics below are missing.",
            value=float(bool(gauges)),
        )
        yield from gauges

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield nothing, so that the registration of a collector does not ask the store."""
        return iter(())

    def _ask(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; ages are by the store's clock, not by this machine's."""
        store = get_store(self._app)
        stats = store.stats()
        records = GaugeMetricFamily(
            "celery_idempotency_records",
            "Unfinished and failed records; live and stale ones are PROCESSING or QUEUED.",
            labels=["state"],
        )
        for state in ("live", "stale", "interrupted", "failed"):
            records.add_metric([state], getattr(stats, state))
        yield records
        stale = store.list(Selection(stale=True), limit=LOOK_AT, look_at=LOOK_AT).records
        oldest_ms = min((each.deadline_ms or stats.now_ms for each in stale), default=stats.now_ms)
        yield GaugeMetricFamily(
            "celery_idempotency_longest_stale_seconds",
            "How long ago the lease of the oldest stale claim ended; 0 if no claim is stale.",
            value=max(stats.now_ms - oldest_ms, 0) / 1000,
        )
        if stats.swept_ms is not None:
            yield GaugeMetricFamily(
                "celery_idempotency_last_sweep_age_seconds",
                "How long ago the last sweep ended, by the store's clock.",
                value=max(stats.now_ms - stats.swept_ms, 0) / 1000,
            )
