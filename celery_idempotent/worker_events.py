"""What became of a call, as events of Celery's workers: for ``celery events``, and for monitors of your own.

Where the app is made::

    from celery_idempotent import worker_events

    worker_events.install(app)

A worker that sends task events (``-E``, ``worker_send_task_events``) sends ``idempotency-replayed`` and so on, too.
They are not of the group ``task``: Celery's ``State``, which Flower is made of, would take their names for states.

::

    task-started ─ task-claimed ─ task-revoked     State: STARTED, CLAIMED, and CLAIMED it stays
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from celery import signals as celery_signals

from celery_idempotent.protocol.telling import OUTCOMES, facts

if TYPE_CHECKING:
    from celery import Celery
    from celery.apps.worker import Worker

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.signals import Event

__all__ = ["install"]

logger = logging.getLogger(__name__)

#: So many events wait for a broker that is slow or away; then the oldest are dropped.
MOST_WAITING: Final = 1000

_EventFields = dict[str, str | int | bool | float]


def install(app: AnyCelery) -> None:
    """Send events from the workers of this app, as far as they send task events. To call it again changes nothing."""
    sender = _Sender(app)
    uid = f"{__name__}.{id(app)}"
    celery_signals.celeryd_after_setup.connect(sender.worker_begins, weak=False, dispatch_uid=uid)
    for signal, (outcome, _) in OUTCOMES.items():
        signal.connect(sender.sending(outcome), weak=False, dispatch_uid=f"{uid}.{outcome}")


class _Sender:
    """Sends what happens in this process, in a thread of its own: no run waits for the broker, or fails with it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._hostname: str | None = None  # of a worker that sends task events
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._waiting: deque[tuple[str, _EventFields]] = deque(maxlen=MOST_WAITING)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def worker_begins(self, sender: str, instance: Worker, **_: object) -> None:
        """Note whether this worker sends task events: nothing else says so in the processes of its pool."""
        if instance.app is self._app:
            self._hostname = sender if getattr(instance, "task_events", False) else None

    def sending(self, outcome: str) -> Callable[..., None]:
        """Return the receiver of one outcome."""

        def send(event: Event, **_: object) -> None:
            if self._hostname is None:
                return
            fields: _EventFields = {"uuid": event.task_id, **facts(outcome, event)}
            if event.seconds is not None:
                fields["seconds"] = event.seconds
            self._waiting.append((f"idempotency-{outcome}", fields))
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="idempotency-events", daemon=True
                )
                self._thread.start()

        return send

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                with self._app.events.default_dispatcher(hostname=self._hostname) as dispatcher:
                    while self._waiting:
                        name, fields = self._waiting.popleft()
                        dispatcher.send(name, retry=False, **fields)
            except Exception as error:  # noqa: BLE001  each broker fails in its own way, and no run waits for these
                logger.debug("idempotency: events were not sent: %r", error)
