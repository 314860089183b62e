"""Types of Celery's, named once; and that an ``IdempotentTask``'s signatures take a key.

The stubs of Celery list all options one by one. Nothing here is there when a program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task
from celery.canvas import Signature
from celery.result import AsyncResult

__all__ = ["AnyTask", "KeyedSignature", "Options", "Result", "Sig", "TaskBase"]

#: What ``apply_async`` takes by name: each option has a type of its own.
Options = dict[str, Any]

if TYPE_CHECKING:
    Result = AsyncResult[Any]
    Sig = Signature[Any]
    AnyTask = Task[Any, Any]

    class KeyedSignature(Signature[Any]):
        """A signature whose options are those of :meth:`IdempotentTask.apply_async`."""

        def set(self, immutable: bool | None = None, **options: Any) -> KeyedSignature: ...
        def clone(self, args: Any = None, kwargs: Any = None, **options: Any) -> KeyedSignature: ...
        def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any: ...
        def apply_async(
            self, args: Any = None, kwargs: Any = None, route_name: Any = None, **options: Any
        ) -> AsyncResult[Any]: ...

    class TaskBase(Task[Any, Any]):
        """A task whose signatures are such."""

        def s(self, *args: Any, **kwargs: Any) -> KeyedSignature: ...
        def si(self, *args: Any, **kwargs: Any) -> KeyedSignature: ...
        def signature(
            self, args: Any = None, kwargs: Any = None, **options: Any
        ) -> KeyedSignature: ...

else:
    AnyTask, KeyedSignature, Result, Sig, TaskBase = Task, Signature, AsyncResult, Signature, Task
