"""What the middleware for ASGI and for WSGI share, and that for WSGI.

A request is the scope of ASGI or the environ of WSGI::

    key ─ body ─ caller ─ claim ─▶ the application ─┬─ complete ─────────────────▶ settle ─ send
                                                    └─ over the limit: pass it on ─ settle ─ send the rest
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import responses
from io import BytesIO
from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_idempotent.errors import InvalidOption
from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, Headers, RequestRefused
from celery_idempotent.http.guard import (
    METHODS,
    Exchange,
    Guard,
    HttpOptions,
    RequestFunction,
    sequence,
)
from celery_idempotent.http.requests import Request, read_header
from celery_idempotent.keys.stamp import is_text
from celery_idempotent.protocol.options import accept_if, option, read_options
from celery_idempotent.records import HTTP_NAMESPACE
from celery_idempotent.stores import Store, get_store, open_store

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.records import Stored

# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareOptions(HttpOptions):
    """The options of the middleware: those of views but ``atomic``, and its own."""

    #: Of ASGI it may be a coroutine function.
    scope: RequestFunction | None = option(
        None, accept_if(callable, "must be a function of the request")
    )
    atomic: bool = option(
        False, accept_if(lambda value: value is False, "needs Django: use @idempotent_view")
    )
    methods: tuple[str, ...] = option(
        ("POST", "PATCH"), sequence(METHODS.__contains__, "POST, PUT, PATCH and DELETE")
    )
    paths: tuple[str, ...] = option(
        ("/",),
        sequence(
            lambda path: isinstance(path, str) and path[:1] == "/", 'paths, which begin with "/"'
        ),
    )
    name: str = option(HTTP_NAMESPACE, accept_if(is_text, "must be a short string"))


# -- requests ----------------------------------------------------------------------------------------------------------


def _method_and_path(request: Request) -> tuple[str, str]:
    if "headers" in request:
        return request["method"], request["path"]
    path = _text(request, "SCRIPT_NAME") + _text(request, "PATH_INFO")
    return request["REQUEST_METHOD"], path


def _text(environ: Request, name: str) -> str:
    return str(environ.get(name, "")).encode("latin-1").decode("utf-8", "surrogateescape")


def bearer_scope(request: Request) -> tuple[str, str] | None:
    """Return a digest of the bearer token as the scope: a new token is another caller.

    A digest is no credential for those who can read records.
    """
    scheme, _, token = (read_header(request, "Authorization") or "").strip().partition(" ")
    is_known = scheme.lower() == "bearer" and token.strip()
    return ("bearer", hashlib.sha256(token.strip().encode()).hexdigest()) if is_known else None


# -- the guard ---------------------------------------------------------------------------------------------------------


class Middleware:
    """Guards the requests to an application, however a server calls it.

    Args:
        app: the application.
        store: a store, its URL, or a Celery app, whose store it is; it connects with the first request.
        scope: a function of the request that returns its caller; without one a request gets 403.
        options: those of the page on HTTP: ``paths``, ``methods``, ``lease``, ``retention`` …

    Raises:
        InvalidOption: for an unknown option or a bad value.
    """

    def __init__(
        self,
        app: Any,
        *,
        store: Store | str | AnyCelery,
        scope: Callable[[Request], object],
        **options: object,
    ) -> None:
        where = type(self).__name__
        given = read_options(MiddlewareOptions, [(where, {**options, "scope": scope})])
        self.app, self.options = app, given
        found = open_store(store) if isinstance(store, str) else store
        if not isinstance(found, (Store, Celery)):
            raise InvalidOption(f"store of {where} must be a URL, a store or a Celery app.")
        opener = partial(get_store, found) if isinstance(found, Celery) else lambda: found
        self.guard = Guard(given.name, app, given, opener, given.name)

    def guards(self, request: Request) -> bool:
        """May this request have a key?"""
        (method, path), paths = _method_and_path(request), self.options.paths
        if method not in self.options.methods:
            return False
        # The path may have the prefix below which the application is mounted, and so may the option.
        prefix = request.get("root_path") or _text(request, "SCRIPT_NAME")
        return path.startswith(paths) or path.removeprefix(prefix).startswith(paths)


class ServedRequest(Exchange):
    """A request to an application that may have a key, and the response, whose ``parts`` are not sent yet."""

    options: MiddlewareOptions
    body: bytes
    status, reason, size = 0, "", 0
    headers: Headers

    def __init__(self, middleware: Middleware, request: Request) -> None:
        super().__init__(middleware.guard)
        self.app, self.environ = middleware.app, request
        self.parts = list[bytes]()

    # -- the request ---------------------------------------------------------------------------------------------------

    def given(self) -> tuple[Request, bytes]:
        """Return the request and its body."""
        return self.environ, self.body

    def caller(self) -> object:
        """Return whose key it is."""
        assert self.options.scope is not None, "it is required"
        return self.options.scope(self.environ)

    def target(self) -> tuple[str, str, dict[str, list[str]]]:
        """Return method, path and the fields of the query, which are bytes."""
        query = self.environ.get("query_string", b"").decode("latin-1")
        query = query or self.environ.get("QUERY_STRING", "")
        return *_method_and_path(self.environ), requests.fields_of(query)

    def body_form(self) -> str:
        """Return the form of the body."""
        return requests.body_form(read_header(self.environ, "Content-Type") or "", self.body)

    def refusal(self, authorize: RequestFunction) -> None:
        """Refuse a caller whom ``authorize`` does not accept."""
        if authorize(self.environ) is not True:
            raise RequestRefused("replay_refused", "You may not see the response any more.")

    # -- the response --------------------------------------------------------------------------------------------------

    def add(self, part: bytes) -> None:
        """Add a part of the body."""
        if not self.status:
            raise RuntimeError("the application sent a body without a status")
        self.parts.append(part)
        self.size += len(part)

    @property
    def is_large(self) -> bool:
        """Is it too large to be stored?"""
        return self.size > self.options.max_response_bytes

    def take(self) -> bytes:
        """Return the parts that are not sent yet; they are then."""
        taken = b"".join(self.parts)
        self.parts.clear()
        return taken

    def become(self, answer: Answer) -> None:
        """Respond with an answer that is not the application's."""
        self.status, self.headers, self.parts = answer.status, list(answer.headers), [answer.body]
        if self.status not in (204, 304):
            self.headers.append(("Content-Length", str(len(answer.body))))
        self.reason = answer.reason or responses.get(self.status, "Unknown")

    def kept_response(self) -> Stored:
        """Return the response if it is one to repeat; any other leaves as an exception."""
        why = f"it has more than {self.options.max_response_bytes} bytes" if self.is_large else ""
        body = b"" if why else b"".join(self.parts)
        return self.kept(None, (self.status, self.reason, self.headers, body, why))


# -- WSGI --------------------------------------------------------------------------------------------------------------

Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]


class IdempotencyMiddleware(Middleware):
    """Lets requests to a WSGI application take effect once for each ``Idempotency-Key`` of a caller.

    ``scope`` is a function of the WSGI environ.
    """

    def __call__(self, environ: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        exchange = _WsgiExchange(self, environ, start_response)
        return exchange.whole() if self.guards(environ) else exchange.run_unguarded()


class _WsgiExchange(ServedRequest):
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

    def given(self) -> tuple[Request, bytes]:
        """Return the request with an input of its own: the application's stays unread."""
        return {**self.environ, "wsgi.input": BytesIO(self.body)}, self.body

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
        self.status, self.headers = int(code), [(name, value) for name, value in headers]
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
