"""Types of Celery's, named once; and that an ``IdempotentTask``'s signatures take a key.

The stubs of Celery list all options one by one. Nothing here is there when a program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from celery import Celery, Task
from celery.canvas import Signature
from celery.result import AsyncResult

#: What ``apply_async`` takes by name: each option has a type of its own.
Options = dict[str, Any]

if TYPE_CHECKING:
    Result = AsyncResult[Any]
    Sig = Signature[Any]
    AnyTask = Task[Any, Any]
    #: A result backend, and a task's request: each kind has more than the stubs say, and some of it may be missing.
    AnyBackend: TypeAlias = Any
    AnyRequest: TypeAlias = Any
    #: An app, whatever the class of its tasks.
    AnyCelery = Celery[Any]

    class KeyedSignature(Sig):
        """A signature whose options are those of :meth:`IdempotentTask.apply_async`."""

        def set(self, immutable: bool | None = None, **options: object) -> KeyedSignature: ...

    class TaskBase(AnyTask):
        """A task whose signatures are such."""

        def s(self, *args: object, **kwargs: object) -> KeyedSignature: ...
        def si(self, *args: object, **kwargs: object) -> KeyedSignature: ...
        def signature(
            self, args: object = None, kwargs: object = None, **options: object
        ) -> KeyedSignature: ...

else:
    AnyCelery, AnyTask, TaskBase = Celery, Task, Task
    KeyedSignature, Result, Sig = Signature, AsyncResult, Signature
