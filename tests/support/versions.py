"""Versions of one app in one process: each publishes messages and runs them, whoever published them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from celery.signals import before_task_publish

from celery_idempotent import IdempotentTask

__all__ = ["Version"]

_noting: list[list[Any]] = []


class Version:
    """An app with one task, ``charge(order, kind, tenant)``, as a deploy has it; ``options`` are those of the task.

    ``does(task)`` is what it does beside noting the run, ``runs`` are those of this version.
    """

    def __init__(
        self, store: Any, *, name: str = "charge", base: type = IdempotentTask, **options: Any
    ) -> None:
        self.app = Celery(
            "version", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self.app.conf.idempotency_store = store
        self.runs: list[tuple[Any, ...]] = []
        self.does: Callable[[Any], Any] = lambda _: "receipt"

        def charge(task: Any, order: str, kind: str = "sale", tenant: str = "t") -> Any:
            self.runs.append((order, kind))
            return self.does(task)

        self.task: Any = self.app.task(name=name, base=base, bind=True, shared=False, **options)(
            charge
        )

    def publish(self, *args: Any, **options: Any) -> SimpleNamespace:
        """Publish, and return the message."""
        found: SimpleNamespace = self.noting(lambda: self.task.apply_async(args, **options))[-1]
        return found

    def noting(self, call: Callable[[], Any]) -> list[Any]:
        """Return the messages that a call publishes."""
        found: list[Any] = []

        def note(headers: Any, body: Any, **_: Any) -> None:
            if _noting[-1] is not found:
                return  # a run within a run
            args, kwargs, embed = body
            found.append(
                SimpleNamespace(headers=dict(headers), args=args, kwargs=kwargs, embed=embed)
            )

        _noting.append(found)
        # Not weak: a receiver that dies makes Celery 5.4 look at another list than the one that it sends to.
        before_task_publish.connect(note, weak=False)
        try:
            call()
        finally:
            before_task_publish.disconnect(note)
            _noting.pop()
        return found

    def run(self, message: SimpleNamespace) -> tuple[str, Any]:
        """Run a message as a worker's child does; return how it ended, and its value or what it was published as."""
        task, task_id = self.task, message.headers["id"]
        request = {
            **message.headers,
            **message.embed,
            "task": task.name,
            "args": message.args,
            "kwargs": message.kwargs,
            "delivery_info": {"redelivered": False},
            "hostname": "here",
            "is_eager": False,
        }
        ended: list[Any] = []
        tracer = build_tracer(task.name, task, app=self.app)
        again = self.noting(
            lambda: ended.append(tracer(task_id, message.args, message.kwargs, request))
        )
        (done,) = ended
        if again:
            return "again", again[-1]
        state = done.info.state if done.info is not None else "SUCCESS"
        return state, done.retval

    def close(self) -> None:
        self.app.close()
