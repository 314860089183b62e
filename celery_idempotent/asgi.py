"""``Idempotency-Key`` for an ASGI application: FastAPI, Starlette, Litestar, Quart, or that of a Django project.

::

    app.add_middleware(IdempotencyMiddleware, store="redis://localhost:6379/1", scope=bearer_scope)

The protocol runs in a thread, the application on the event loop::

    thread    claim ─┐                        ┌─ settle ─┐
    loop             └─▶ app: response ───────┘          └─▶ send ─▶ app: background tasks
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.doors import (
    Door,
    Request,
    Response,
    Target,
    bearer_scope,
    read_header,
    response_of,
    session_scope,
)
from celery_idempotent.http.guard import to_the_end

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

__all__ = ["IdempotencyMiddleware", "bearer_scope", "session_scope"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Request, Receive, Send], Awaitable[None]]


class IdempotencyMiddleware:
    """Lets requests to an ASGI application take effect once for each ``Idempotency-Key`` of a caller.

    Args:
        app: the application, of ASGI 3, on an asyncio event loop.
        store: a store, its URL, or a Celery app, whose store it is; it connects with the first request.
        scope: function of the ASGI scope that returns the caller, or a coroutine function; ``None``: 403.
        threads: how many guarded requests run at once in this process; more of them wait.
        options: those of the page on HTTP: ``paths``, ``methods``, ``lease``, ``retention`` …

    Raises:
        InvalidOption: for an unknown option, or a bad value.
    """

    def __init__(
        self,
        app: Application,
        *,
        store: Store | str | AnyCelery,
        scope: Callable[[Request], object],
        threads: int = 100,
        **options: object,
    ) -> None:
        self.app = app
        self.door = Door(app, store, {**options, "scope": scope})
        # Not the loop's own: an endpoint that waits for one of its threads would never get one.
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="idempotency")

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            query = scope.get("query_string", b"").decode("latin-1")
            target = Target(scope["method"], scope["path"], query)
            if self.door.guards(scope, target):
                exchange = _Exchange(self, scope, target, receive, send)
                await to_the_end(exchange.serve())
                return
        await self.app(scope, receive, send)


class _Exchange:
    """A request that needs a key, and the response to it."""

    body = b""
    #: Has the application got the body?
    is_received = False
    #: Is a part of the response with the server?
    is_passed = False
    #: The application, once it runs.
    running: asyncio.Future[None] | None = None

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        scope: Request,
        target: Target,
        receive: Receive,
        send: Send,
    ) -> None:
        self.app, self.door, self.pool = middleware.app, middleware.door, middleware.pool
        self.scope, self.target, self.receive, self.send = scope, target, receive, send
        self.response = Response(self.door.options.max_response_bytes)
        self.loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[None] = self.loop.create_future()
        self.sent = asyncio.Event()

    async def serve(self) -> None:
        """Answer the request, then let the application end."""
        try:
            try:
                found = await self._answer()
            except RequestRefused as refused:
                found = self.door.refusal(refused)
            if isinstance(found, Answer) and not self.is_passed:
                self.response = response_of(found)
            await self._pass(more=False)
        finally:
            self.sent.set()
            if self.running is not None:
                await self.running

    async def _answer(self) -> object:
        """Return the response of the application, or the answer in its place."""
        key = self.door.key(self.scope)
        caller = self.door.options.scope(self.scope)
        identity = self.door.identity(await caller if isawaitable(caller) else caller, key)
        self.body = await self._read()
        answer = partial(self.door.answer, self.scope, self.target, identity, self.body, self._run)
        return await self.loop.run_in_executor(self.pool, copy_context().run, answer)

    async def _read(self) -> bytes:
        """Receive the body, whole and within its limit."""
        limit = self.door.options.max_request_bytes
        length = read_header(self.scope, "Content-Length")
        requests.declared_size(length, max_bytes=limit)
        parts, size, more = list[bytes](), 0, True
        while more and 0 <= size <= limit:
            message = await self.receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size = -1 if message["type"] == "http.disconnect" else size + len(parts[-1])
        requests.receive(length, max_bytes=limit, read=lambda: size)
        return b"".join(parts)

    # -- the application -----------------------------------------------------------------------------------------------

    def _run(self) -> Response:
        """Run the application on the event loop; this is a thread, whose context it gets."""
        return asyncio.run_coroutine_threadsafe(self._respond(), self.loop).result()

    async def _respond(self) -> Response:
        """Start the application; return its response when that is complete."""
        # Extensions that send files, trailers or early responses would bypass the record.
        extensions = {
            name: value
            for name, value in (self.scope.get("extensions") or {}).items()
            if not name.startswith("http.response.")
        }
        scope = {**self.scope, "extensions": extensions}
        self.running = asyncio.ensure_future(self.app(scope, self._receive, self._send))
        await asyncio.wait((self.running, self.complete), return_when=asyncio.FIRST_COMPLETED)
        if not self.complete.done():
            await self.running
            raise RuntimeError("the application returned before its response was complete")
        return self.door.kept(self.response)

    async def _receive(self) -> Message:
        """Give the application the body; it hears of a client that hangs up when its response is sent."""
        if not self.is_received:
            self.is_received = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.sent.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Take a message of the application; the last one returns when its response is sent."""
        if message["type"] == "http.response.start":
            headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]]
            self.response.start(message["status"], headers)
        elif message["type"] == "http.response.body" and not self.complete.done():
            if self.response.is_large:
                await self._pass(more=True)
            self.response.add(message.get("body", b""))
            if not message.get("more_body", False):
                self.complete.set_result(None)
                await self.sent.wait()

    async def _pass(self, *, more: bool) -> None:
        """Pass on to the server what is there of the response."""
        response = self.response
        with suppress(OSError):  # the client has hung up: the application goes on
            if not self.is_passed:
                self.is_passed = True
                raw = [
                    (k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in response.headers
                ]
                start = {"type": "http.response.start", "status": response.status, "headers": raw}
                await self.send(start)
            body = response.take()
            await self.send({"type": "http.response.body", "body": body, "more_body": more})
