"""Requests through each door, to be counted: to a bare application; first ones and repetitions to a guarded one."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent import signals

_BODY, _PAID = b'{"amount": 17, "currency": "EUR"}', b'{"paid": 33}'
_SCOPE: Any = {"scope": lambda _: "acct_1"}

#: Prepares a request with a key, to be sent by a call.
Request = Callable[[str], Callable[[], object]]


def prepare_requests(url: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what prepares one request of each kind."""
    signals.WRITE_EVERY = 3600.0  # under valgrind 5 seconds have a fiftieth of the requests
    kinds = dict[str, Callable[[], Callable[[], object]]]()
    for door, make in (("@idempotent_view", _django), ("WSGI", _wsgi), ("ASGI", _asgi)):
        bare, guarded = make(url)
        kinds[f"{door}: bare"] = partial(_new, bare, repeats=False)
        kinds[f"{door}: first request"] = partial(_new, guarded, repeats=False)
        kinds[f"{door}: repetition"] = partial(_new, guarded, repeats=True)
    return kinds


def _new(request: Request, *, repeats: bool) -> Callable[[], object]:
    key = str(uuid.uuid4())
    if repeats:
        request(key)()
    return request(key)


def _django(url: str) -> tuple[Request, Request]:
    """Return what prepares a request to a bare view, and one to a guarded view."""
    import celery
    import django
    from django.conf import settings

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database}, ROOT_URLCONF=__name__)
    django.setup()

    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpRequest, JsonResponse
    from django.test import RequestFactory
    from django.urls import path

    from celery_idempotent.django.http import idempotent_view

    app = celery.Celery("bench", broker="memory://", set_as_current=True)
    app.conf.idempotency_store = url
    app.set_default()

    def view(request: HttpRequest) -> JsonResponse:
        return JsonResponse({"paid": len(request.body)}, status=201)

    globals()["urlpatterns"] = [path("a", view), path("b", idempotent_view(**_SCOPE)(view))]
    handler, factory = WSGIHandler(), RequestFactory()

    def request(where: str, key: str) -> Callable[[], object]:
        made = factory.post(where, _BODY, "application/json", headers={"Idempotency-Key": key})
        return lambda: _check(handler.get_response(made).status_code)

    return partial(request, "/a"), partial(request, "/b")


def _check(status: object) -> None:
    assert str(status).startswith("201"), status


def _wsgi(url: str) -> tuple[Request, Request]:
    from celery_idempotent.wsgi import IdempotencyMiddleware

    def app(environ: Any, start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("201 Created", [("Content-Type", "application/json")])
        return [_PAID]

    def request(served: Any, key: str) -> Callable[[], object]:
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "wsgi.input": io.BytesIO(_BODY)}
        environ |= {"CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(_BODY))}
        environ["HTTP_IDEMPOTENCY_KEY"] = key
        return lambda: list(served(environ, lambda status, _: _check(status)))

    return partial(request, app), partial(request, IdempotencyMiddleware(app, store=url, **_SCOPE))


def _asgi(url: str) -> tuple[Request, Request]:
    from celery_idempotent.asgi import IdempotencyMiddleware

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": _PAID})

    async def receive() -> Any:
        return {"type": "http.request", "body": _BODY}

    async def send(message: Any) -> None:
        _check(message.get("status", 201))

    def request(served: Any, key: str) -> Callable[[], object]:
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
        headers.append((b"content-length", b"%d" % len(_BODY)))
        scope = {"type": "http", "method": "POST", "path": "/pay", "headers": headers}
        return lambda: loop.run_until_complete(served(scope, receive, send))

    loop = asyncio.new_event_loop()
    return partial(request, app), partial(request, IdempotencyMiddleware(app, store=url, **_SCOPE))
