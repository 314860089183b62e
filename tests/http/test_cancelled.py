"""A time-out around the ASGI middleware takes effect at once, and the application goes on to its record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from celery_idempotent.asgi import IdempotencyMiddleware, bearer_scope
from tests.http.callers import AsgiClient
from tests.http.sites import new_key

App = Callable[[Any, Any, Any], Awaitable[None]]


async def by_wait_for(app: App, *given: Any) -> None:
    await asyncio.wait_for(app(*given), 0.2)


async def by_anyio(app: App, *given: Any) -> None:
    with anyio.fail_after(0.2):
        await app(*given)


async def by_starlette(app: App, *given: Any) -> None:
    """Below a middleware of Starlette's, which has streams and a task group of its own."""
    from starlette.middleware.base import BaseHTTPMiddleware

    async def untouched(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    await by_anyio(BaseHTTPMiddleware(app, untouched), *given)


async def by_hanging_up(app: App, *given: Any) -> None:
    """As hypercorn, which cancels the request of a client that hangs up."""
    task = asyncio.ensure_future(app(*given))
    await asyncio.sleep(0.2)
    task.cancel()
    await task


class Slow:
    """An application that answers when it may ``go``."""

    def __init__(self) -> None:
        self.go, self.runs, self.fails = asyncio.Event(), 0, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.shutdown"
            return
        self.runs += 1
        await self.go.wait()
        if self.fails:
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})


class Place:
    """A client before a guarded slow application."""

    def __init__(self, **options: Any) -> None:
        self.slow, self.sent = Slow(), list[Any]()
        self.app = IdempotencyMiddleware(
            self.slow, store="memory://", scope=bearer_scope, **options
        )
        self.client, self.key = AsgiClient(self.app), new_key()
        self.headers = {**self.client.headers, "Idempotency-Key": self.key}

    async def cancelled(self, how: Any) -> float:
        """Return how long the outer code waits, in seconds."""

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        began = time.monotonic()
        with pytest.raises((asyncio.TimeoutError, TimeoutError, asyncio.CancelledError)):
            await how(self.app, self.client.scope("POST", "/pay", self.headers), receive, send)
        return time.monotonic() - began

    async def again(self) -> Any:
        return await self.client.serve(self.client.scope("POST", "/pay", self.headers), [b""])

    async def shut_down(self) -> None:
        async def receive() -> Any:
            return {"type": "lifespan.shutdown"}

        await self.app({"type": "lifespan"}, receive, receive)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [by_wait_for, by_anyio, by_starlette, by_hanging_up])
@pytest.mark.parametrize("limit", [1000, 10])
def test_a_cancelled_request_ends_at_once_and_its_application_goes_on(how: Any, limit: int) -> None:
    async def main() -> None:
        place = Place(max_response_bytes=limit)
        used = time.process_time()
        asyncio.get_running_loop().call_later(1.5, place.slow.go.set)
        assert await place.cancelled(how) < 1
        assert (await place.again()).status == 409
        await place.shut_down()
        assert not place.app.works
        assert time.process_time() - used < 1, "nobody is busy"
        again = await place.again()
        told = (201, True) if limit > 100 else (410, False)
        assert (again.status, again.replayed) == told
        assert (place.slow.runs, place.sent) == (1, [])

    asyncio.run(main())


def test_a_shutdown_waits_for_a_lease_and_says_how_many_requests_still_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        place = Place(lease=0.3)
        await place.cancelled(by_wait_for)
        await place.shut_down()
        assert "1 requests still run at shutdown" in caplog.text
        place.slow.go.set()
        await place.shut_down()
        assert (await place.again()).replayed

    asyncio.run(main())


def test_a_shutdown_writes_the_counts_because_uvicorn_ends_without_exit_functions() -> None:
    async def main() -> None:
        place = Place(name="counted")
        place.slow.go.set()
        assert (await place.again()).status == 201
        await place.shut_down()
        counts = place.app.guard.open_store().counts(hours=2)
        assert ("counted", "claimed") in {(each.task, each.outcome) for each in counts}

    asyncio.run(main())


def test_a_failure_that_nobody_waits_for_is_logged_and_releases_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        place = Place()
        await place.cancelled(by_wait_for)
        place.slow.fails = True
        place.slow.go.set()
        await place.shut_down()
        place.slow.fails = False
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert record.exc_info
        assert record.exc_info[0] is ZeroDivisionError
        assert (await place.again()).status == 201

    asyncio.run(main())
