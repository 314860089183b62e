"""What a type checker knows of an ``IdempotentTask``'s signatures: a key and a scope are options of theirs.

The stubs of Celery list all options one by one. Nothing here is there when a program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task
from celery.canvas import Signature

__all__ = ["KeyedSignature", "TaskBase"]

if TYPE_CHECKING:
    from celery.result import AsyncResult

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
    KeyedSignature, TaskBase = Signature, Task
