"""Metrics for Prometheus: outcomes from our signals, and gauges that ask the store when they are scraped.

``pip install 'celery-idempotent[prometheus]'``, then where the app is made::

    from celery_idempotent import metrics

    metrics.install(
        app, port=9464
    )  # a worker serves http://…:9464/metrics; without a port: your own endpoint does

Names and labels are listed in docs/operating.md. Counters and histograms are of this process (with
PROMETHEUS_MULTIPROC_DIR, of all children of a worker); the gauges are the store's, the same from any process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from celery.signals import worker_ready

from celery_idempotent import signals
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Selection
from celery_idempotent.signals import OUTCOMES, Event, OutcomeSignal
from celery_idempotent.stores import get_store

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "celery_idempotent.metrics needs prometheus_client: pip install 'celery-idempotent[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from celery.worker.consumer import Consumer

    from celery_idempotent.celery.typed import AnyCelery

__all__ = ["StoreCollector", "install"]

logger = logging.getLogger(__name__)

#: Of what the store takes, and of waits for another run, in seconds.
BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
#: So many stale records are looked at, at most, to find the one that has been stale for longest.
LOOK_AT: Final = 500
#: How long a scrape waits for the store, in seconds: less than Prometheus waits for the scrape.
ANSWER_WITHIN: Final = 2.0


@cache
def _count_outcomes(registry: CollectorRegistry) -> None:
    """Count and time events into a registry; asked again, nothing more."""
    counter = Counter(
        "celery_idempotency_outcomes",
        "What became of a task, a request or a record. observed=true: what would have happened, in mode observe.",
        ("task", "outcome", "state", "error", "observed"),
        registry=registry,
    )
    timed: dict[OutcomeSignal, Histogram] = {}

    def histogram(name: str, text: str, *outcomes: OutcomeSignal) -> None:
        name = f"celery_idempotency_{name}_seconds"
        made = Histogram(name, text, ("task",), buckets=BUCKETS, registry=registry)
        timed.update(dict.fromkeys(outcomes, made))

    histogram(
        "claim", "How long the store took to answer a claim that a run began with.", signals.claimed
    )
    histogram(
        "settle",
        "How long it took to write the end of a run, with every try, and with the COMMIT of an atomic task.",
        signals.settled,
    )
    histogram(
        "wait",
        "How long a duplicate held its worker until it was answered, refused or sent back; not the wait in the queue.",
        signals.replayed,
        signals.conflicted,
        signals.mismatched,
    )

    def counting(outcome: OutcomeSignal) -> Callable[..., None]:
        def count(event: Event, **_: object) -> None:
            counter.labels(
                task=event.task,
                outcome=outcome.counter,
                state="" if event.state is None else event.state.value,
                error="" if event.error is None else type(event.error).__name__,
                observed=str(event.observed).lower(),
            ).inc()
            if outcome in timed and event.seconds is not None:
                timed[outcome].labels(event.task).observe(event.seconds)

        return count

    for outcome in OUTCOMES.values():
        outcome.connect(counting(outcome), weak=False)


class StoreCollector(Collector):
    """Gauges of an app's store, asked for with each scrape: a few round trips, however many records there are."""

    def __init__(self, app: AnyCelery) -> None:
        self._app = app
        self._thread: threading.Thread | None = None
        self._gauges: Sequence[GaugeMetricFamily] = ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; of a store that does not answer within :data:`ANSWER_WITHIN` only that it is not up."""
        # In one thread: a store that hangs costs a scrape its gauges alone, and is not asked again by each scrape.
        if self._thread is None or not self._thread.is_alive():
            self._gauges = ()
            name = "celery-idempotent-metrics"
            self._thread = threading.Thread(target=self._ask_store, name=name, daemon=True)
            self._thread.start()
        self._thread.join(ANSWER_WITHIN)
        gauges = self._gauges
        yield GaugeMetricFamily(
            "celery_idempotency_store_up",
            "1 if the store answers this scrape within two seconds, 0 if not: then none of the following is served.",
            value=float(bool(gauges)),
        )
        yield from gauges

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Name nothing: to register a collector must not ask the store."""
        return iter(())

    def _ask_store(self) -> None:
        try:
            self._gauges = list(self._ask())
        except IdempotencyError as error:
            logger.warning("idempotency: metrics without those of the store: %s", error)

    def _ask(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of the store, by two questions; ages are by its clock, not by this machine's."""
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
            "How long ago the lease of the claim that went stale first was over; 0 if no claim is stale.",
            value=max(stats.now_ms - oldest_ms, 0) / 1000,
        )
        if stats.swept_ms is not None:
            yield GaugeMetricFamily(
                "celery_idempotency_last_sweep_age_seconds",
                "How long ago the last sweep ended, by the store's clock.",
                value=max(stats.now_ms - stats.swept_ms, 0) / 1000,
            )


def install(
    app: AnyCelery, *, port: int | None = None, registry: CollectorRegistry = REGISTRY
) -> None:
    """Count outcomes in this process and those that it forks; call it where the app is made.

    ``port``: each worker of the app serves its metrics there, with those of :class:`StoreCollector`; a prefork worker
    needs ``PROMETHEUS_MULTIPROC_DIR``. Without a port, expose ``registry``, and register a ``StoreCollector(app)``.
    """
    _count_outcomes(registry)
    if port is not None:
        uid = f"{__name__}.{id(app)}"
        worker_ready.connect(partial(_serve, app, port, registry), weak=False, dispatch_uid=uid)


def _serve(
    app: AnyCelery, port: int, registry: CollectorRegistry, sender: Consumer, **_: object
) -> None:
    """Serve from a worker's main process until that ends; a port that is taken costs the metrics, not the worker."""
    if sender.app is not app:
        return
    shown = CollectorRegistry()
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
    else:
        shown.register(registry)
        if type(sender.pool).__module__ == "celery.concurrency.prefork":
            logger.warning(
                "idempotency: the metrics of this worker lack what its pool's processes count: set "
                "PROMETHEUS_MULTIPROC_DIR to an empty directory before it starts"
            )
    shown.register(StoreCollector(app))
    try:
        start_http_server(port, registry=shown)
    except OSError as error:
        logger.error("idempotency: no metrics on port %s: %s", port, error)
    else:
        logger.info("idempotency: metrics on port %s", port)
