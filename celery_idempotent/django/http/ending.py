"""Lets the work of a request come to its end, also when its client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextvars import Context, copy_context
from typing import TypeVar

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


async def to_the_end(work: Awaitable[Value], *, name: str) -> Value:
    """Await ``work``, which a cancellation does not reach; it is passed on when the work is done.

    Django cancels a coroutine when its client hangs up; between an effect and its record it must not::

        client       view (cancelled)           the same, to its end
        POST    ───▶ charge: done               charge: done
        hangs up ──✂ CancelledError, release    … answer, settle, CancelledError
        POST    ───▶ charge: once more          the first answer
    """
    contexts: list[Context] = []

    async def whole() -> Value:
        try:
            return await work
        finally:
            contexts.append(copy_context())

    task = asyncio.ensure_future(whole())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # noqa: PERF203  it may come more than once
            cancelled = error
    # A task has a context of its own; what the view set in it, as a language, is there for the middleware.
    for context in contexts:
        _take_over(context)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        logger.error("idempotency: %s failed, and its client has gone", name, exc_info=failure)
    raise cancelled


def _take_over(context: Context) -> None:
    here = copy_context()
    for variable, value in context.items():
        if variable not in here or here[variable] is not value:
            variable.set(value)
