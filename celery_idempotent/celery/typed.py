"""Types of Celery's, named once; and that an ``IdempotentTask``'s signatures take a key, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.canvas import Signature
from celery.result import AsyncResult

from celery_idempotent.records import EarlierCall

#: What ``apply_async`` takes by name: each option has a type of its own.
Options = dict[str, Any]

if TYPE_CHECKING:
    Result = AsyncResult[Any]
    Sig = Signature[Any]
    AnyTask = Task[Any, Any]
    #: An app, whatever the class of its tasks.
    AnyCelery = Celery[Any]

    class KeyedSignature(Sig):
        """A signature that takes the options of :meth:`IdempotentTask.apply_async`."""

        def set(self, immutable: bool | None = None, **options: object) -> KeyedSignature: ...

    class TaskBase(AnyTask):
        """A task with such signatures and results."""

        def delay(self, *args: Any, **kwargs: Any) -> CallResult: ...
        def AsyncResult(self, task_id: str, **options: Any) -> CallResult: ...  # noqa: N802
        def s(self, *args: object, **kwargs: object) -> KeyedSignature: ...
        def si(self, *args: object, **kwargs: object) -> KeyedSignature: ...
        def signature(
            self, args: object = None, kwargs: object = None, **options: object
        ) -> KeyedSignature: ...

else:
    AnyCelery, AnyTask, TaskBase = Celery, Task, Task
    KeyedSignature, Result, Sig = Signature, AsyncResult, Signature


class CallResult(Result):
    """The result of a call, which may be that of an earlier call with its key; nothing is asked for this."""

    #: Had another call the key before? ``None``: not known, as without ``idempotency_publish_once``.
    duplicate: bool | None = None
    #: That other call.
    earlier: EarlierCall | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"duplicate": self.duplicate, "earlier": self.earlier}
        return (*super().__reduce__(), known)
