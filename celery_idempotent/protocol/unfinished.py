"""Bodies that return before they have run: coroutines and generators."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from functools import lru_cache, partial

from celery_idempotent.errors import IdempotencyError


def kind_of(function: object) -> str:
    """Return what a call of ``function`` gives instead of running it, ``""`` if it runs it.

    What is hidden behind a decorator or a lambda is found when it returns (:func:`is_unfinished`).
    """
    while isinstance(function, partial):
        function = function.func
    # An object that is called as a function.
    for each in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each):
            return "coroutine"
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "generator"
    return ""


@lru_cache(maxsize=256)
def is_unfinished(kind: type) -> bool:
    """Is a value of this class a run that has not come to its end, in place of a result?

    Remembered: to ask abstract classes takes a hundred times as long.
    """
    return issubclass(kind, (Awaitable, Generator, AsyncGenerator))


def close(name: str, value: object) -> IdempotencyError:
    """Close a run that was never begun, and return the error that says so."""
    for end in ("close", "cancel"):
        if callable(how := getattr(value, end, None)):
            how()
            break
    return IdempotencyError(
        f"{name} returned a {type(value).__name__} that was not run: it was closed, and its key is free again. A "
        "task runs what it has to do before it returns, by asyncio.run(…) for example."
    )
