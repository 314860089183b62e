"""Serializes a task's result and exception, and reads them as Celery's result backend would."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from celery.canvas import Signature
from celery.result import ResultBase

from celery_idempotent.celery.typed import Sig
from celery_idempotent.errors import IdempotencyError, ResultUnavailable
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Stored
from celery_idempotent.serializers import (
    NotStored,
    Serializer,
    first_accepted,
    from_bytes,
    to_bytes,
)

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)


class TaskCodec:
    """Values of one task; one that cannot be stored raises ``NotStored``."""

    def __init__(self, app: Celery, task: str, policy: Policy) -> None:
        conf = app.conf
        self._app, self._task, self._policy = app, task, policy
        accept = tuple(conf.result_accept_content or conf.accept_content)
        name = policy.serializer or first_accepted(conf.result_serializer, accept)
        option = "idempotency_serializer" if policy.serializer else "result_serializer"
        serializer = Serializer(name, accept, what=f"{option} of task {task}")
        self._format, self.load_value = name, serializer.load
        self.dump_given = partial(serializer.dump, max_bytes=policy.max_result_bytes)
        #: An app may publish in a format that it does not accept itself.
        accept = tuple(conf.accept_content)
        name = first_accepted(conf.task_serializer, accept)
        self._messages = Serializer(name, accept, what="task_serializer")

    def dump_value(self, value: object) -> Stored | None:
        """Serialize a result as the result backend would."""
        if not self._policy.store_result:
            return None
        if value is None:
            return self._nothing
        if isinstance(value, ResultBase):
            value = value.as_tuple()  # type: ignore[attr-defined]  # of all results
        return self.dump_given(value)

    @cached_property
    def _nothing(self) -> Stored:
        """The serialized ``None``, which most tasks return: kombu is slow."""
        return self.dump_given(None)

    def dump_error(self, error: BaseException) -> Stored:
        """Serialize an exception as the result backend would."""
        backend: Any = self._app.backend
        return self.dump_given(backend.prepare_exception(error, self._format))

    def dump_step(self, name: str, value: object) -> Stored:
        """Serialize the result of a step, or raise ``IdempotencyError``."""
        try:
            return self.dump_given(value)
        except NotStored as problem:
            raise IdempotencyError(
                f"The result of step {name!r} of {self._task} cannot be recorded ({problem}): return a value from the "
                "step that the serializer can write, or a smaller one."
            ) from None

    def load_error(self, stored: Stored | None) -> Exception:
        """Return the stored exception; ``ResultUnavailable`` if there is none that may be raised again."""
        reason = "was not stored: see the log of its worker"
        if stored is not None:
            backend: Any = self._app.backend
            written = self.load_value(stored)
            try:
                error = backend.exception_to_python(written)
            except Exception as damaged:  # noqa: BLE001  it may be no exception at all
                reason = f"cannot be read ({type(damaged).__name__})"
            else:
                kind = type(error).__qualname__
                # Celery rebuilds it as another one if the class does not accept its own args.
                first = written["exc_type"] if isinstance(written, dict) else kind
                if isinstance(error, Exception) and kind == first:
                    return error
                reason = f"is a {first}, which cannot be raised again"
        return ResultUnavailable(f"{self._task} failed permanently, and its exception {reason}.")

    def dump_message(self, signature: Sig) -> bytes | None:
        """Serialize a message that a sweep may publish again; ``None`` if that fails."""
        try:
            return to_bytes(self._messages.dump(as_sent(self._app, signature)))
        except NotStored as problem:
            logger.warning(
                "idempotency: the message of %s cannot be stored (%s), so it is not requeued after a crash",
                self._task,
                problem,
            )
            return None

    def load_message(self, message: bytes) -> Sig:
        """Return what :meth:`dump_message` stored; raises as :meth:`.Serializer.load`."""
        content = cast("dict[str, object]", self._messages.load(from_bytes(message)))
        return Signature.from_dict(content, app=self._app)


def as_sent(app: Celery, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call with its arguments as the message carries them: dumps in the place of pydantic models."""
    # Celery < 5.7 sends models as they are.
    dump = getattr(app.tasks.get(call["task"]), "_dump_pydantic_arguments", None)
    args, kwargs = call["args"], call["kwargs"]
    args, kwargs = (args, kwargs) if dump is None else dump(args, kwargs)
    return {**call, "args": args, "kwargs": kwargs}
