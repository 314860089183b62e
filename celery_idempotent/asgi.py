"""``Idempotency-Key`` for an ASGI application: FastAPI, Starlette, Litestar, Quart, or that of a Django project.

::

    app.add_middleware(IdempotencyMiddleware, store="redis://localhost:6379/1", scope=bearer_scope)

The protocol runs in a thread, the application on the event loop, in a task of its own::

    thread    claim ─┐                        ┌─ settle ─┐
    loop             └─▶ app: response ───────┘          └─▶ send ─▶ app: background tasks

Who cancels the request, as a time-out around it or a server whose client hung up, waits no longer, and nothing is sent
any more. Thread and task go on: between an effect and its record an end would release the key, and the next attempt
would charge once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from math import inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.middleware import Middleware, ServedRequest, bearer_scope
from celery_idempotent.http.requests import Request, read_header
from celery_idempotent.protocol.lease import heartbeat

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.records import Stored
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

__all__ = ["IdempotencyMiddleware", "bearer_scope"]

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
        #: Requests that are not over, and for which their server no longer waits.
        self.works = set[asyncio.Task[None]]()

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and self.guards(scope):
            await _Exchange(self, scope, receive, send).whole()
        elif scope["type"] == "lifespan":
            await self.app(scope, partial(self._receive_shutdown, receive), send)
        else:
            await self.app(scope, receive, send)

    async def _receive_shutdown(self, receive: Receive) -> Message:
        """Let what still runs come to its end before the application closes what it needs."""
        message = await receive()
        if message["type"] != "lifespan.shutdown":
            return message
        if self.works:
            _, left = await asyncio.wait(self.works, timeout=self.options.lease_ms / 1000)
            if left:
                logger.warning("idempotency: %d requests still run at shutdown", len(left))
        # uvicorn then ends by SIGTERM, and no exit function is called.
        await asyncio.to_thread(heartbeat.finish)
        return message


def _report_failure(work: asyncio.Task[None]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("idempotency: a request that was cancelled has failed", exc_info=error)


async def _drop(_: Message) -> None:
    """Send nothing: whom it would be for has cancelled the request."""


class _Exchange(ServedRequest):
    #: The body, until the application has it.
    unread: bytes | None = None
    #: Has the server a part of the response?
    is_passed = False
    #: The application, once it runs; its response is complete, or never will be, then with an error for the thread.
    running: asyncio.Future[None] | None = None
    is_complete = False
    completed: SimpleQueue[BaseException | None]
    #: Whose key it is.
    whose: object
    #: What the thread returned or raised, which it says by ``answered``; the response is ``sent``.
    found: object = None
    error: BaseException | None = None
    answered: asyncio.Event
    sent: asyncio.Event
    settle_seconds = inf

    def __init__(
        self, middleware: IdempotencyMiddleware, scope: Request, receive: Receive, send: Send
    ) -> None:
        super().__init__(middleware, scope)
        self.pool, self.works = middleware.pool, middleware.works
        self.server_receive, self.send = receive, send
        self.loop = asyncio.get_running_loop()

    async def whole(self) -> None:
        """Answer the request, then let the application end."""
        try:
            if self.read_key():
                await self._read()
                if self.guard.key_header is None:
                    self.find_key()
            if self.raw_key is not None:
                whose = super().caller()
                self.whose = await whose if isawaitable(whose) else whose
        except RequestRefused as refused:
            self.become(refused.answer(self.options.docs_url))
            return await self._pass(more=False)
        if self.raw_key is None:
            return await self.run_unguarded()
        self.answered = asyncio.Event()
        # run_in_executor() takes 60 thousand instructions more.
        self.pool.submit(copy_context().run, self._ask)
        try:
            return await self._finish()
        except asyncio.CancelledError:
            self.send = _drop
            work = self.loop.create_task(self._finish())
            self.works.add(work)
            work.add_done_callback(self.works.discard)
            work.add_done_callback(_report_failure)
            raise

    def _ask(self) -> None:
        """Go through the protocol; this is the thread."""
        try:
            self.found = self.answer()
        except RequestRefused as refused:
            self.found = refused.answer(self.options.docs_url)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self.error = error
        self.loop.call_soon_threadsafe(self.answered.set)

    async def _finish(self) -> None:
        """Send the response when the thread is done, and wait for the end of the application."""
        await self.answered.wait()
        error = self.error
        if error is None:
            try:
                if isinstance(self.found, Answer) and not self.is_passed:
                    self.become(self.found)
                await self._pass(more=False)
            except Exception as failure:  # noqa: BLE001  raised when the application has ended
                error = failure
        if self.running is not None:
            self.sent.set()
            await asyncio.shield(self.running)
            self.running = None  # whose context has this exchange
        if error is not None:
            raise error

    def caller(self) -> object:
        return self.whose

    async def _read(self) -> None:
        """Receive the body, whole and within its limit."""
        length, limit = read_header(self.environ, "Content-Length"), self.options.max_request_bytes
        declared = requests.declared_size(length, max_bytes=limit)
        parts, size, more = list[bytes](), 0, True
        while more and 0 <= size <= limit:
            message = await self.server_receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size = -1 if message["type"] == "http.disconnect" else size + len(parts[-1])
        requests.check_size(size, declared, max_bytes=limit)
        self.body = self.unread = b"".join(parts)

    # -- the application -----------------------------------------------------------------------------------------------

    async def run_unguarded(self) -> None:
        await self.app(self.environ, self._receive, self.send)

    def respond(self) -> Stored:
        """Run the application on the event loop, in the context of this thread, until its response is complete."""
        self.completed, self.sent = SimpleQueue(), asyncio.Event()
        self.loop.call_soon_threadsafe(self._start)
        if (error := self.completed.get()) is not None:
            raise error
        return self.kept_response()

    def _start(self) -> None:
        # What is sent by path or in trailers, for example, would not be in the record. The scope is no copy: middleware
        # around this one finds the route in it.
        known = (self.environ.get("extensions") or {}).items()
        shown = {name: value for name, value in known if not name.startswith("http.response")}
        self.environ["extensions"] = shown
        self.running = asyncio.ensure_future(self.app(self.environ, self._receive, self._send))
        self.running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Future[None]) -> None:
        if not self.is_complete:
            why = "the application ended before its response was complete"
            failure = None if running.cancelled() else running.exception()
            self.completed.put(failure or RuntimeError(why))

    async def _receive(self) -> Message:
        """Give the application the body; a client that hangs up does so after the response."""
        body, self.unread = self.unread, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if self.raw_key is None:
            return await self.server_receive()
        await self.sent.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Take a message of the application; the last one returns when the response is sent."""
        if message["type"] == "http.response.start":
            raw = message.get("headers", ())
            headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in raw]
            self.status, self.headers = message["status"], headers
        elif message["type"] == "http.response.body" and not self.is_complete:
            if self.is_large:
                await self._pass(more=True)
            self.add(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_complete = True
                self.completed.put(None)
                await self.sent.wait()

    async def _pass(self, *, more: bool) -> None:
        """Pass on to the server what is there of the response."""
        is_first, self.is_passed = not self.is_passed, True
        body = {"type": "http.response.body", "body": self.take(), "more_body": more}
        try:
            if is_first:
                raw = [
                    (key.lower().encode("latin-1"), value.encode("latin-1"))
                    for key, value in self.headers
                ]
                start = {"type": "http.response.start", "status": self.status, "headers": raw}
                await self.send(start)
            await self.send(body)
        except Exception as error:
            # The client has hung up, or who cancelled the request has closed its streams; the application goes on.
            if not isinstance(error, OSError) and self.send is not _drop:
                raise
