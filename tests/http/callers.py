"""One application behind each door, and a client that calls it as a server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from django.http import HttpResponse
from django.test import RequestFactory

from celery_idempotent.asgi import IdempotencyMiddleware as OfASGI
from celery_idempotent.asgi import bearer_scope
from celery_idempotent.django.http import idempotent_view
from celery_idempotent.wsgi import IdempotencyMiddleware as OfWSGI

__all__ = ["DOORS", "KINDS", "Answer", "Call", "Client", "Handler", "open_client"]

#: The doors of the middleware, and all.
KINDS = ("asgi", "wsgi")
DOORS = (*KINDS, "django")


@dataclass(frozen=True)
class Call:
    """What the application gets."""

    method: str
    path: str
    body: bytes
    #: The scope or the environ.
    request: Any


#: Returns status, headers and the parts of the body, which it may compute one by one.
Handler = Callable[[Call], tuple[int, list[tuple[str, str]], Iterable[bytes]]]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    parts: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replayed(self) -> bool:
        return ("idempotent-replayed", "true") in self.headers

    def of(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def code(self) -> tuple[int, str]:
        """Return status and code of a problem."""
        assert self.of("content-type") == ["application/problem+json"], self
        assert self.json["status"] == self.status
        return self.status, self.json["code"]


def asgi_app(handler: Handler) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        call = Call(scope["method"], scope["path"], body, scope)
        status, headers, parts = handler(call)
        raw = [(key.lower().encode(), value.encode("latin-1")) for key, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return app


def wsgi_app(handler: Handler) -> Any:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        path = environ["SCRIPT_NAME"] + environ["PATH_INFO"]
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        status, headers, parts = handler(Call(environ["REQUEST_METHOD"], path, body, environ))
        start_response(f"{status} As It Is", headers)
        yield from parts

    return app


@dataclass
class Client:
    """Calls a door; ``sent`` is what the server has got so far, ``gone`` a client that hung up."""

    app: Any
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": "Bearer ann"})
    sent: list[bytes] = field(default_factory=list)
    gone: bool = False
    #: The prefix below which the application is mounted.
    root: str = ""

    def ask(
        self,
        key: str | None,
        body: bytes = b"",
        *,
        method: str = "POST",
        path: str = "/pay",
        **headers: str,
    ) -> Answer:
        length = str(len(body))
        given = {"Content-Type": "application/json", "Content-Length": length, **self.headers}
        if key is not None:
            given["Idempotency-Key"] = key
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self._ask(method, path, body, {k: v for k, v in given.items() if v})

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        raise NotImplementedError


class AsgiClient(Client):
    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        scope = self.scope(method, path, headers)
        return asyncio.run(self.serve(scope, [body[:5], body[5:]]))

    def scope(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        return {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": self.root,
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()],
            "extensions": {"http.response.trailers": {}, "http.response.pathsend": {}, "tls": {}},
        }

    async def serve(self, scope: Any, parts: list[bytes], *, ends: bool = True) -> Answer:
        told: list[Any] = []
        self.sent.clear()
        incoming = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) or not ends}
            for number, part in enumerate(parts, 1)
        ]

        async def receive() -> Any:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if self.gone:
                raise OSError("gone")
            told.append(message)
            self.sent.append(message.get("body", b""))

        await self.app(scope, receive, send)
        if self.gone:
            return Answer(0, [], [])
        start, *body = told
        assert [each.get("more_body", False) for each in body] == [True] * (len(body) - 1) + [False]
        headers = [(k.decode(), v.decode("latin-1")) for k, v in start["headers"]]
        return Answer(start["status"], headers, [each.get("body", b"") for each in body])


class WsgiClient(Client):
    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": self.root.encode().decode("latin-1"),
            "PATH_INFO": path.removeprefix(self.root).encode().decode("latin-1"),
            "QUERY_STRING": "",
            "wsgi.input": BytesIO(body),
        }
        for name, value in headers.items():
            prefix = "" if name in ("Content-Type", "Content-Length") else "HTTP_"
            environ[prefix + name.upper().replace("-", "_")] = value
        return self.serve(environ)

    def serve(self, environ: dict[str, Any]) -> Answer:
        setup_testing_defaults(environ)
        started: list[Any] = []
        self.sent.clear()

        def write(part: bytes) -> None:
            if self.gone:
                raise OSError("gone")
            self.sent.append(part)

        def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
            if exc_info:
                raise exc_info[1]
            started.append((status, headers))
            return write

        iterable = validator(self.app)(environ, start_response)
        for part in iterable:
            with suppress(OSError):
                write(part)
        if hasattr(iterable, "close"):
            iterable.close()
        ((status, headers),) = started
        lower = [(name.lower(), value) for name, value in headers]
        return Answer(int(status.split()[0]), lower, [part for part in self.sent if part])


class DjangoClient(Client):
    """Calls a view, whose store is that of the app in Django's settings."""

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        factory: Any = RequestFactory()
        answer = self.app(factory.generic(method, path, body, headers=headers))
        named = [(name.lower(), value) for name, value in answer.items()]
        return Answer(answer.status_code, named, [answer.content])


def django_view(handler: Handler) -> Any:
    def view(request: Any) -> HttpResponse:
        call = Call(request.method, request.path_info, request.body, request)
        status, headers, parts = handler(call)
        return HttpResponse(b"".join(parts), status=status, headers=dict(headers))

    return view


def open_client(kind: str, handler: Handler, **options: Any) -> Any:
    """Return a client of an application behind a door."""
    given = {"scope": bearer_scope, "store": "memory://", **options}
    if kind == "asgi":
        return AsgiClient(OfASGI(asgi_app(handler), **given))
    if kind == "wsgi":
        return WsgiClient(OfWSGI(validator(wsgi_app(handler)), **given))
    given = {"scope": lambda request: bearer_scope(request.META), **options}
    return DjangoClient(idempotent_view(django_view(handler), **given))
