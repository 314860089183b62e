"""The middleware for WSGI: one request, its body, its run, and what the server gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, Headers, RequestRefused
from celery_idempotent.http.middleware import Middleware, ServedRequest
from celery_idempotent.http.requests import Request

if TYPE_CHECKING:
    from celery_idempotent.records import Stored

Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]


class IdempotencyMiddleware(Middleware):
    """Lets requests to a WSGI application take effect once for each ``Idempotency-Key`` of a caller.

    ``scope`` is a function of the WSGI environ.
    """

    def __call__(self, environ: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        exchange = _Exchange(self, environ, start_response)
        return exchange.whole() if self.guards(environ) else exchange.run_unguarded()


class _Exchange(ServedRequest):
    #: The server's; it has a part of the response then.
    write: Write | None = None

    def __init__(
        self, middleware: Middleware, environ: Request, start_response: StartResponse
    ) -> None:
        super().__init__(middleware, environ)
        self.server_start, self.rest = start_response, _Rest()

    def whole(self) -> Iterable[bytes]:
        """Answer the request; the application ends when the server has sent what is returned."""
        try:
            found = self.serve()
            if self.write is None:
                if isinstance(found, Answer):
                    self.become(found)
                elif self.raw_key is None:
                    unguarded: Iterable[bytes] = found
                    return unguarded
                self._start()
            self.rest.append(self.take())
        except BaseException:
            self.rest.close()
            raise
        return self.rest

    def receive(self) -> None:
        limit = self.options.max_request_bytes
        is_chunked = "HTTP_TRANSFER_ENCODING" in self.environ
        if is_chunked and not self.environ.get("wsgi.input_terminated"):
            raise RequestRefused("length_required", "Send the body with its Content-Length.")
        declared = requests.declared_size(self.environ.get("CONTENT_LENGTH"), max_bytes=limit)
        # No more than there is: a server may wait for the rest of an input that it does not end.
        parts, left = list[bytes](), limit + 1 if is_chunked else declared
        try:
            while left and (part := self.environ["wsgi.input"].read(min(left, 65_536))):
                parts.append(part)
                left -= len(part)
            size = sum(map(len, parts))
        except OSError:  # of a server that notices that it broke off
            size = -1
        requests.check_size(size, declared, max_bytes=limit)
        self.body = body = b"".join(parts)
        self.given = self.environ, body
        length = {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        self.environ = {**self.environ, **length}
        self.environ.pop("HTTP_TRANSFER_ENCODING", None)

    def run_unguarded(self) -> Iterable[bytes]:
        parts: Iterable[bytes] = self.app(self.environ, self.server_start)
        return parts

    def respond(self) -> Stored:
        """Run the application, and return its response when that is complete."""
        parts = self.app(self.environ, self._start_response)
        self.rest.close = getattr(parts, "close", self.rest.close)
        for part in parts:
            self._add(part)
        if not self.status:
            raise RuntimeError("the application did not call start_response")
        return self.kept_response()

    def _start_response(self, status: str, headers: Headers, exc_info: Any = None) -> Write:
        if self.write is not None:
            return self.server_start(status, headers, exc_info)  # which raises it
        if self.status and exc_info is None:
            raise RuntimeError("the application called start_response twice")
        code, _, self.reason = status.partition(" ")
        self.status, self.headers = int(code), headers
        return self._add

    def _add(self, part: bytes) -> None:
        """Take a part of the body; those before it are passed on if it is too large to be stored."""
        if self.is_large:
            self.write = self.write or self._start()
            with suppress(OSError):  # the client has hung up, and the application goes on
                self.write(self.take())
        self.add(part)

    def _start(self) -> Write:
        return self.server_start(f"{self.status} {self.reason}", self.headers)


class _Rest(list[bytes]):
    """The body from where it is not sent yet; a server closes it when it has sent it."""

    close: Callable[[], object] = staticmethod(lambda: None)
