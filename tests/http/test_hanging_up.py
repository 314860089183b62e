"""A client that hangs up does not stop what it asked for: the next attempt gets the first answer."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from celery_idempotent.http.guard import to_the_end
from tests.http.sites import Site, Web, new_key
from tests.support.waiting import wait_for

language = ContextVar("language", default="en")


def hang_up(web: Web, path: str, key: str, *, when: Callable[[], bool]) -> None:
    """Send a request, and leave without its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=60)
    connection.request("POST", path, b"", {"Idempotency-Key": key, "X-Caller": "c"})
    wait_for(when, 30)
    connection.close()


@pytest.mark.parametrize("name", ["aheld", "held"])
def test_a_view_whose_client_hangs_up_is_not_run_again(site: Site, asgi: Web, name: str) -> None:
    key, path = new_key(), f"/t/{name}/"
    runs = site.directory / f"runs-{key}"

    def again(web: Web) -> int:
        return web.ask("POST", path, b"", key=key, X_Caller="c").status

    hang_up(asgi, path, key, when=runs.exists)
    # Long enough for the server to hear of it, and to give the key back if it were so minded.
    assert [again(asgi) for _ in range(20)] == [409] * 20
    (site.directory / f"go-{key}").touch()
    wait_for(lambda: again(asgi) != 409, 30)
    answer = asgi.ask("POST", path, b"", key=key, X_Caller="c")
    assert (answer.status, answer.replayed, answer.json) == (200, True, {"run": 1})
    assert runs.stat().st_size == 1


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
