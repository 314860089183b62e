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
from math import inf
from typing import TYPE_CHECKING, Any

from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.guard import to_the_end
from celery_idempotent.http.middleware import (
    Exchange,
    Middleware,
    Request,
    bearer_scope,
    read_header,
    session_scope,
)

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.records import Stored
    from celery_idempotent.stores import Store

__all__ = ["IdempotencyMiddleware", "bearer_scope", "session_scope"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class IdempotencyMiddleware(Middleware):
    """Lets requests to an ASGI application take effect once for each ``Idempotency-Key`` of a caller.

    ``scope`` is a function, or a coroutine function, of the ASGI scope. At most ``threads`` guarded requests run at
    once in this process; others wait.
    """

    def __init__(
        self,
        app: Callable[[Request, Receive, Send], Awaitable[None]],
        *,
        store: Store | str | AnyCelery,
        scope: Callable[[Request], object],
        threads: int = 100,
        **options: object,
    ) -> None:
        super().__init__(app, store=store, scope=scope, **options)
        # Not the loop's own: an endpoint that waits for one of its threads might never get one.
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="idempotency")

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and self.guards(scope):
            await to_the_end(_Exchange(self, scope, receive, send).serve())
        else:
            await self.app(scope, receive, send)


class _Exchange(Exchange):
    #: The body, until the application has it.
    body: bytes | None = None
    #: Has the server a part of the response?
    is_passed = False
    #: The application, once it runs.
    running: asyncio.Future[None] | None = None
    settle_seconds = inf

    def __init__(
        self, middleware: IdempotencyMiddleware, scope: Request, receive: Receive, send: Send
    ) -> None:
        super().__init__(middleware, scope)
        self.pool, self.receive, self.send = middleware.pool, receive, send
        self.loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[None] = self.loop.create_future()
        self.sent = asyncio.Event()

    async def serve(self) -> None:
        """Answer the request, then let the application end."""
        try:
            try:
                found = await self._answer()
            except RequestRefused as refused:
                found = refused.answer(self.options.docs_url)
            if isinstance(found, Answer) and not self.is_passed:
                self.response.become(found)
            await self._pass(more=False)
        finally:
            self.sent.set()
            if self.running is not None:
                await self.running

    async def _answer(self) -> object:
        """Return the response of the application, or an answer in its place."""
        caller = self.middleware.scope(self.request)
        identity = self.identify(await caller if isawaitable(caller) else caller)
        self.body = body = await self._read()
        answer = partial(self.answer_with, identity, body)
        return await self.loop.run_in_executor(self.pool, copy_context().run, answer)

    async def _read(self) -> bytes:
        """Receive the body, whole and within its limit."""
        length, limit = read_header(self.request, "Content-Length"), self.options.max_request_bytes
        declared = requests.declared_size(length, max_bytes=limit)
        parts, size, more = list[bytes](), 0, True
        while more and 0 <= size <= limit:
            message = await self.receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size = -1 if message["type"] == "http.disconnect" else size + len(parts[-1])
        requests.check_size(size, declared, max_bytes=limit)
        return b"".join(parts)

    # -- the application -----------------------------------------------------------------------------------------------

    def respond(self) -> Stored:
        """Run the application on the event loop, in the context of this thread."""
        return asyncio.run_coroutine_threadsafe(self._respond(), self.loop).result()

    async def _respond(self) -> Stored:
        """Start the application, and return its response when that is complete."""
        # What is sent by path or in trailers, for example, would not be in the record. The scope is no copy: middleware
        # around this one finds the route in it.
        known = (self.request.get("extensions") or {}).items()
        shown = {name: value for name, value in known if not name.startswith("http.response")}
        self.request["extensions"] = shown
        app = self.middleware.app(self.request, self._receive, self._send)
        self.running = asyncio.ensure_future(app)
        await asyncio.wait((self.running, self.complete), return_when=asyncio.FIRST_COMPLETED)
        if not self.complete.done():
            await self.running
            raise RuntimeError("the application returned before its response was complete")
        return self.kept_response()

    async def _receive(self) -> Message:
        """Give the application the body; a client that hangs up does so after the response."""
        body, self.body = self.body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.sent.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Take a message of the application; the last one returns when the response is sent."""
        if message["type"] == "http.response.start":
            raw = message.get("headers", ())
            headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in raw]
            self.response.status, self.response.headers = message["status"], headers
        elif message["type"] == "http.response.body" and not self.complete.done():
            if self.response.is_large:
                await self._pass(more=True)
            self.response.add(message.get("body", b""))
            if not message.get("more_body", False):
                self.complete.set_result(None)
                await self.sent.wait()

    async def _pass(self, *, more: bool) -> None:
        """Pass on to the server what is there of the response."""
        response, is_first, self.is_passed = self.response, not self.is_passed, True
        with suppress(OSError):  # the client has hung up, and the application goes on
            if is_first:
                raw = [
                    (key.lower().encode("latin-1"), value.encode("latin-1"))
                    for key, value in response.headers
                ]
                start = {"type": "http.response.start", "status": response.status, "headers": raw}
                await self.send(start)
            body = {"type": "http.response.body", "body": response.take(), "more_body": more}
            await self.send(body)
