"""The admin on a web server whose every request has a process of its own, which kills itself where a header says.

``python -m tests.admin.mortal PORT_FILE``. ``X-Store`` names the store, ``X-Die`` the place: ``before requeue``,
``after cache.bury``, ``before publish``, ``after note``, ``before end`` (of the note).
"""

from __future__ import annotations

import functools
import os
import signal
import socketserver
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.servers.basehttp import WSGIRequestHandler, WSGIServer

_STORES = ("redis", "hybrid")


class Mortal:
    """Gives each request its app and a user who may do everything, and lays the trap."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        from django.contrib.auth.models import User

        from tests.support.admin import make_app

        app = make_app(
            request.headers["X-Store"],
            broker_url=os.environ["BROKER"],
            task_default_queue=request.headers["X-Queue"],
        )
        settings.CELERY_IDEMPOTENT_APP = app
        request._dont_enforce_csrf_checks = True
        request.user = User.objects.get(username="root")
        if "X-Die" in request.headers:
            _lay(app, *request.headers["X-Die"].split())
        return self.get_response(request)


def _lay(app: Any, when: str, what: str) -> None:
    from celery import signals
    from django.contrib.admin.models import LogEntry
    from django.db.models.signals import post_save, pre_save

    from celery_idempotent.celery import reaper
    from celery_idempotent.stores import get_store

    # A sweep shall not have to wait for a minute.
    reaper.REQUEUE_MS = 1
    if what == "publish":
        signal_ = {"before": signals.before_task_publish, "after": signals.after_task_publish}[when]
        signal_.connect(_die, weak=False)
    elif what in {"note", "end"}:
        model_signal = {"before": pre_save, "after": post_save}[when]
        first = what == "note"
        model_signal.connect(
            lambda instance, created=None, **_: (
                _die() if (created if when == "after" else instance.pk is None) is first else None
            ),
            sender=LogEntry,
            weak=False,
        )
    else:
        *path, verb = what.split(".")
        target = functools.reduce(getattr, path, get_store(app))
        setattr(target, verb, functools.partial(_struck, when, getattr(target, verb)))


def _struck(when: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if when == "after":
        verb(*args, **kwargs)
    _die()


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Server(socketserver.ForkingMixIn, WSGIServer):
    """One process a request, as servers have them that fork."""


def main(port_file: Path) -> None:
    """Serve until killed."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__spec__.name}.Mortal"]
    import django

    django.setup()
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from django.db import connections

    call_command("migrate", verbosity=0)
    from django.contrib.auth.models import User

    User.objects.create_superuser("root")
    _warm_up()
    server = Server(("127.0.0.1", 0), WSGIRequestHandler)
    server.set_app(get_wsgi_application())
    connections.close_all()  # none shall be shared with the children
    draft = port_file.with_suffix(".draft")
    draft.write_text(str(server.server_port))
    draft.rename(port_file)
    server.serve_forever()


def _warm_up() -> None:
    """Import what every child would have to import again."""
    from importlib import import_module

    from django.urls import get_resolver

    from tests.support.admin import make_app

    assert get_resolver().url_patterns
    make_app("memory://").amqp.queues  # noqa: B018  made at the first look
    for name in (
        "kombu.transport.redis",
        *(f"celery_idempotent.stores.{s}.store" for s in _STORES),
    ):
        import_module(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
