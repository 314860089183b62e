"""Tasks that are classes of their own, and what those override."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from tests.delivery.recorder import note


class LoudRequest(Request):
    """A request class of one's own, as documents show it."""

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        super().on_timeout(soft, timeout)
        note("on_timeout", soft, timeout, request=self)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        note("on_failure", repr(exc_info.exception), request=self)
        return super().on_failure(
            exc_info, send_failed_event=send_failed_event, return_ok=return_ok
        )


_SOON: dict[str, Any] = {"default_retry_delay": 0.3}


def register(app: Celery) -> None:
    """Define them on an app, whose own class they inherit from."""
    task = partial(app.task, shared=False)
    base: Any = app.Task

    class Handled(base):
        """Every handler there is."""

        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            note("before_start", task_id, args, kwargs)

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            note("on_success", retval, task_id, args, kwargs, self.AsyncResult(task_id).state)

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            state = self.AsyncResult(task_id).state
            note("on_failure", repr(exc), task_id, args, kwargs, bool(einfo), state)

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            note("on_retry", repr(exc), task_id, args, kwargs, bool(einfo))

        def after_return(
            self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
        ) -> None:
            note("after_return", status, repr(retval), task_id, args, kwargs, bool(einfo))

    class Calling(base):
        """Its own ``__call__``."""

        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            note("called", args)
            return super().__call__(*args, **kwargs)

    class Broken(base):
        """A handler that fails."""

        abstract = True

        def on_success(self, *args: Any) -> None:
            raise RuntimeError("a handler that fails")

    task(name="tests.handled", base=Handled, bind=True, acks_late=True, **_SOON)(handled)
    task(name="tests.calling", base=Calling)(plain)
    task(name="tests.broken", base=Broken)(plain)
    task(
        name="tests.requested",
        bind=True,
        Request="tests.delivery.beside_tasks_classes:LoudRequest",
        time_limit=1,
        acks_late=False,
    )(requested)


def handled(self: Any, how: str) -> str:
    note("run", how)
    if how == "fails":
        raise ValueError(how)
    if how == "retries" and not self.request.retries:
        raise self.retry(exc=ValueError(how))
    if how == "ignores":
        raise Ignore(how)
    if how == "rejects":
        raise Reject(how, requeue=False)
    return how


def plain(x: Any) -> Any:
    return x


def requested(self: Any, how: str) -> str:
    if how == "fails":
        raise ValueError(how)
    if how == "sleeps":
        import time

        time.sleep(30)
    return how
