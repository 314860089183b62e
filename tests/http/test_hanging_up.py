"""A client that hangs up does not stop what it asked for: the next attempt gets the first answer."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from celery_idempotent.django.http.views import to_the_end

language = ContextVar("language", default="en")


def test_a_cancellation_is_passed_on_when_the_work_is_done() -> None:
    told: list[str] = []
    go = threading.Event()

    def effect() -> None:
        told.append("begun")
        assert go.wait(30)
        language.set("fr")
        told.append("done")

    async def view() -> str:
        try:
            await to_the_end(effect)
        except asyncio.CancelledError:
            told.append("cancelled")
        return language.get()

    async def main() -> list[str]:
        task = asyncio.ensure_future(view())
        while not told:
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        go.set()
        return [await task, await view(), await view()]

    assert asyncio.run(main()) == ["fr"] * 3
    assert told == ["begun", "done", "cancelled", *["begun", "done"] * 2]
