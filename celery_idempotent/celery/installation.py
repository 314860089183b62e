"""What this library changes outside of itself. To import it changes nothing; the first idempotent task of an app does.

Once per process: canvases take a key, and receivers are connected to Celery's signals. Once per app: ``send_task``
carries a key, and there is a sweep. docs/differences.md lists all of it.
"""

from __future__ import annotations

import threading
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING

from celery import signals
from celery.app.base import Celery as CeleryApp

from celery_idempotent.celery import canvas, delivery, messages, reaper, receivers, registry
from celery_idempotent.celery.typed import Result
from celery_idempotent.settings import real_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

_lock = threading.Lock()

#: What ``send_task`` takes by position after name, args and kwargs: countdown, eta, task_id and so on.
_BY_POSITION = tuple(signature(CeleryApp.send_task).parameters)[4:]


def install(app: Celery) -> None:
    """Let ``app`` carry keys of tasks that it calls by name; binding an idempotent task does this by itself.

    For a program that has the tasks of a worker not, and only names them::

        celery_idempotent.install(app)
        app.send_task("shop.pay", (17,), idempotency_key="order-17")
    """
    app = real_app(app)
    with _lock:
        if not registry.is_installed(app):
            _patch_canvases()
            app.send_task = _carrying(app)  # type: ignore[method-assign]
            registry.note_installed(app)


def install_tasks(app: Celery) -> None:
    """Prepare ``app`` for idempotent tasks of its own: also for its workers and its beat.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    install(app)
    _connect_receivers()
    reaper.install_sweep(app)


@cache
def _patch_canvases() -> None:
    canvas.take_keys()


@cache
def _connect_receivers() -> None:
    """Connect everything that listens to Celery; each acts on an app with idempotent tasks alone."""
    for signal, receiver in (
        (signals.worker_init, receivers.make_store),
        (signals.worker_ready, receivers.check_setup),
        (signals.worker_ready, receivers.watch_children),
        (signals.worker_process_shutdown, receivers.write_counters),
        (signals.worker_shutdown, receivers.end_heartbeat),
        (signals.task_success, delivery.mark_success),
        (signals.task_failure, delivery.mark_failure),
    ):
        uid = f"celery_idempotent.{receiver.__name__}"
        signal.connect(receiver, weak=False, dispatch_uid=uid)


def _carrying(app: Celery) -> Callable[..., Result]:
    """Return a ``send_task`` for this app, around the one that it has."""
    replaced = vars(app).get("send_task")

    @wraps(CeleryApp.send_task)
    def send_task(
        name: str, args: object = None, kwargs: object = None, *rest: object, **options: object
    ) -> Result:
        options.update(zip(_BY_POSITION, rest, strict=False))
        messages.prepare(app, options)
        # The class's method is looked up each time: others (Sentry) replace it whenever they are set up.
        send: Callable[..., Result] = replaced or type(app).send_task.__get__(app)
        return send(name, args, kwargs, **options)

    return send_task
