"""``Idempotency-Key`` for a WSGI application, such as Flask's.

::

    app.wsgi_app = IdempotencyMiddleware(
        app.wsgi_app, store="redis://localhost:6379/1", scope=bearer_scope
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.doors import (
    Door,
    Request,
    Response,
    Target,
    bearer_scope,
    response_of,
    session_scope,
)

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

__all__ = ["IdempotencyMiddleware", "bearer_scope", "session_scope"]

Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]
Application = Callable[[Request, StartResponse], Iterable[bytes]]

_PIECE = 64 * 1024


class IdempotencyMiddleware:
    """Lets requests to a WSGI application take effect once for each ``Idempotency-Key`` of a caller.

    Args:
        app: the application.
        store: a store, its URL, or a Celery app, whose store it is; it connects with the first request.
        scope: function of the WSGI environ that returns the caller; ``None``: 403.
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
        **options: object,
    ) -> None:
        self.app = app
        self.door = Door(app, store, {**options, "scope": scope})

    def __call__(self, environ: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        raw = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        path = raw.encode("latin-1").decode("utf-8", "surrogateescape")
        target = Target(environ["REQUEST_METHOD"], path, environ.get("QUERY_STRING", ""))
        door = self.door
        if not door.guards(environ, target):
            return self.app(environ, start_response)
        exchange = _Exchange(self.app, door, start_response)
        found: object
        try:
            key = door.key(environ)
            identity = door.identity(door.options.scope(environ), key)
            body = _read(environ, door.options.max_request_bytes)
            exchange.environ = _with_body(environ, body)
            found = door.answer(environ, target, identity, body, exchange.run)
        except RequestRefused as refused:
            found = door.refusal(refused)
        except BaseException:
            exchange.close()
            raise
        return exchange.end(found)


def _read(environ: Request, limit: int) -> bytes:
    """Receive the body, whole and within its limit."""
    length, is_chunked = environ.get("CONTENT_LENGTH"), "HTTP_TRANSFER_ENCODING" in environ
    if is_chunked and not environ.get("wsgi.input_terminated"):
        raise RequestRefused("length_required", "Send the body with its Content-Length.")
    parts: list[bytes] = []

    def read() -> int:
        # No more than there is: a server may wait for the rest of an input that it does not end.
        left = limit + 1 if is_chunked else int(length or 0)
        while left and (part := environ["wsgi.input"].read(min(left, _PIECE))):
            parts.append(part)
            left -= len(part)
        return sum(map(len, parts))

    requests.receive(length, max_bytes=limit, read=read)
    return b"".join(parts)


def _with_body(environ: Request, body: bytes) -> Request:
    found = {**environ, "wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    found.pop("HTTP_TRANSFER_ENCODING", None)
    return found


class _Body(list[bytes]):
    """The rest of a body, whose ``close`` is the application's: a server calls it when it is sent."""

    close: Callable[[], object]


class _Exchange:
    """A request that needs a key, and the response to it."""

    environ: Request
    #: The server's; set when a part of the response is with it.
    write: Write | None = None

    def __init__(self, app: Application, door: Door, start_response: StartResponse) -> None:
        self.app, self.door, self.server_start = app, door, start_response
        self.response = Response(door.options.max_response_bytes)
        self.close: Callable[[], object] = lambda: None

    def run(self) -> Response:
        """Run the application; return its response when that is complete."""
        found = self.app(self.environ, self._start_response)
        self.close = getattr(found, "close", self.close)
        for part in found:
            self._add(part)
        if not self.response.status:
            raise RuntimeError("the application did not call start_response")
        return self.door.kept(self.response)

    def end(self, found: object) -> Iterable[bytes]:
        """Return the response, from where it is not sent yet, or the answer in its place."""
        if isinstance(found, Answer) and self.write is None:
            self.close()
            self.response, self.close = response_of(found), lambda: None
        if self.write is None:
            self._start()
        rest = _Body([self.response.take()])
        rest.close = self.close
        return rest

    def _start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Write:
        if self.write is not None:
            return self.server_start(status, headers, exc_info)  # raises it
        if self.response.status and exc_info is None:
            raise RuntimeError("start_response was called twice")
        code, _, reason = status.partition(" ")
        self.response.start(int(code), headers, reason)
        return self._add

    def _start(self) -> Write:
        response = self.response
        status = f"{response.status} {response.reason}"
        return self.server_start(status, list(response.headers))

    def _add(self, part: bytes) -> None:
        if self.response.is_large:
            if self.write is None:
                self.write = self._start()
            with suppress(OSError):  # the client has hung up: the application goes on
                self.write(self.response.take())
        self.response.add(part)
