"""The empty tasks that are compared, on Celery's own class and on IdempotentTask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery, Task

from benchmarks import libraries
from benchmarks.stamps import Stamps
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    PlainBase = Task[Any, Any]
else:
    PlainBase = Task

#: What a webhook brings, about 1 kB of JSON: more than a number to take a fingerprint of.
PAYLOAD = {
    "id": "evt_0123456789abcdef",
    "type": "order.paid",
    "lines": [
        {"sku": f"SKU-{n:05}", "name": f"Article number {n}", "count": n, "price": 9.5 + n}
        for n in range(12)
    ],
    "customer": {"id": 4711, "name": "Ada Example", "mail": "ada@example.com", "tags": ["a", "b"]},
}


def make_app(
    *, broker: str, backend: str, stamps: Path | None = None, peers: bool = False
) -> Celery:
    """Return an app with the tasks; the store is the result backend; peers: others' too."""
    app = Celery("bench", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(
        task_default_queue="bench",
        broker_connection_retry_on_startup=True,
        # kombu's 10 are too few for 20 greenlets that acknowledge at once.
        broker_transport_options={"max_connections": 100},
        worker_hijack_root_logger=False,
    )
    notes = Stamps(stamps) if stamps else None

    class Stamped:
        """Notes when a message is started: not in the body, which a replay does not reach."""

        def before_start(self, _task_id: str, args: Any, _kwargs: Any) -> None:
            if notes is not None:
                notes.start(args[0])

    class Plain(Stamped, PlainBase):
        abstract = True

    class Idempotent(Stamped, IdempotentTask):
        abstract = True

    class Apart(Idempotent):
        """Celery stores its results: it has a backend of its own."""

        abstract = True
        backend: Any = property(lambda self: self.app.backend)

    def empty(n: int) -> None:
        if notes is not None:
            notes.run(n)

    def receive(n: int, event: Any) -> None:  # noqa: ARG001  what matters is its size, or that it is the key
        empty(n)

    def trips(n: int) -> None:
        get_store(app).now_ms()
        empty(n)
        get_store(app).now_ms()

    def add(name: str, base: type[Any], body: Any = empty, **options: Any) -> None:
        define: Any = app.task  # its overloads do not know our options
        define(name=name, base=base, shared=False, **options)(body)

    add("plain", Plain)
    add("plain_late", Plain, acks_late=True, reject_on_worker_lost=True)
    add("plain_ignore", Plain, ignore_result=True)
    add("plain_webhook", Plain, receive)
    add("trips_ignore", Plain, trips, ignore_result=True)
    add("by_task_id", Idempotent)
    add("by_argument", Idempotent, idempotency_key="n")
    add("portable", Apart, idempotency_key="n")
    add("by_argument_ignore", Idempotent, idempotency_key="n", ignore_result=True)
    add("by_webhook", Idempotent, receive, idempotency_key=("n", "event.id"))
    add("again", Idempotent, receive, idempotency_key="event", idempotency_fingerprint="event")
    if peers:
        libraries.configure(app, backend)
        for name, peer in libraries.installed().items():
            add(name, type(name, (Stamped, peer.task_class()), {"abstract": True}))
    app.finalize()
    return app
