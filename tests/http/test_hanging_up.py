"""A client that hangs up does not stop what it asked for: the next attempt gets the first answer."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from celery_idempotent.django.http.views import to_the_end

language = ContextVar("language", default="en")


def test_a_cancellation_is_passed_on_when_the_work_is_done() -> None:
    told: list[str] = []

    async def main() -> str:
        go = asyncio.Event()

        async def effect() -> None:
            told.append("begun")
            await go.wait()
            language.set("fr")
            told.append("done")

        async def view() -> str:
            try:
                await to_the_end(effect())
            except asyncio.CancelledError:
                told.append("cancelled")
            return language.get()

        task = asyncio.ensure_future(view())
        for _ in range(2):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        return await task

    assert (asyncio.run(main()), told) == ("fr", ["begun", "done", "cancelled"])
