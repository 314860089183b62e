"""One API behind five doors: ``python -m tests.http.frameworks DOOR PORT_FILE``; ``site`` is the site under ASGI.

Each run is noted in a file ``runs-KEY``. ``held`` and the work ``later`` go on when there is a file ``go-KEY``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from celery_idempotent import current_claim
from celery_idempotent.http.middleware import bearer_scope
from celery_idempotent.http.requests import read_header

Load = Callable[[], Any]


def tell(port: int) -> None:
    """Write the port to the file that the command line ends with."""
    draft = Path(sys.argv[-1]).with_suffix(".draft")
    draft.write_text(str(port))
    draft.rename(sys.argv[-1])


def listening() -> socket.socket:
    found = socket.create_server(("127.0.0.1", 0), backlog=128)
    tell(found.getsockname()[1])
    return found


def gunicorn(load: Load, *, threads: int = 16) -> None:
    """Serve by a server that decodes chunked bodies."""
    from gunicorn.app.base import BaseApplication

    class Site(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
        def load_config(self) -> None:
            given: dict[str, Any] = {"bind": "127.0.0.1:0", "threads": threads}
            given |= {"timeout": int(os.environ.get("WORKER_TIMEOUT", "30"))}
            given["when_ready"] = lambda arbiter: tell(arbiter.LISTENERS[0].sock.getsockname()[1])
            if "control_socket_disable" in self.cfg.settings:  # from 25 on
                given["control_socket_disable"] = True
            for name, value in given.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            return load()

    Site().run()


def uvicorn(load: Load) -> None:
    import uvicorn

    root = os.environ.get("SCRIPT_NAME", "")  # which gunicorn reads, too
    config = uvicorn.Config(load(), lifespan="off", log_level="info", root_path=root)
    uvicorn.Server(config).run([listening()])


def hypercorn(load: Load) -> None:
    """Serve by a server that cancels the request of a client that hangs up."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config, app = Config(), load()
    found = listening()
    config.bind = [f"fd://{found.fileno()}"]
    asyncio.run(serve(app, config))


__all__ = ["DOORS", "PIECES", "urlpatterns"]

DOORS = ("django-wsgi", "django-asgi", "fastapi", "starlette", "flask")
#: The parts of a response that is too large to be stored, and their size.
PIECES = 8, 1000

JSON = {"Content-Type": "application/json"}
#: Status, headers, body, and whether that is a stream.
Answered = tuple[int, dict[str, str], Iterable[bytes]]


def options() -> dict[str, Any]:
    """Return the options that all doors have."""
    return {
        "lease": int(os.environ.get("LEASE", "2")),
        "max_response_bytes": 3000,
        "max_request_bytes": 10_000,
        "authorize": may_see,
    }


def may_see(request: Any, **_: Any) -> object:
    """Let everybody see a replay who does not say otherwise; what is not ``True`` refuses."""
    return read_header(getattr(request, "META", request), "X-Refused") is None or "an object"


def owner(request: Any) -> object:
    """Return the caller of a request of Django's."""
    return bearer_scope(request.META)


def wait_to_go(key: str) -> None:
    while not Path(f"go-{key}").exists():
        time.sleep(0.01)


def work(name: str, argument: str, body: bytes) -> Answered:
    """Note a run, and do what the path says."""
    claim = current_claim()
    assert claim is not None
    key = claim.key
    with Path(f"runs-{key}").open("ab") as file:
        file.write(b"x")
        run = file.tell()
    told: dict[str, object] = {"run": run}
    status, headers = 200, {**JSON}
    if name == "plain":
        told["nonce"] = os.urandom(8).hex()
        status = 201
        headers |= {"Location": "/things/1", "X-Request-Id": "1", "Set-Cookie": "s=1"}
    elif name == "held" and run == 1:
        wait_to_go(key)
    elif name == "large":
        count, size = PIECES
        return 200, {"Content-Type": "text/plain"}, (b"%d" % n * size for n in range(count))
    elif name == "status" and run == 1:
        status = int(argument)
    elif name == "broken" and run == 1:
        raise ZeroDivisionError
    elif name == "unsendable" and run == 1:
        headers["X-Next"] = {"nul": "/a\0b", "lines": "/a\r\nSet-Cookie: sid=evil"}[argument]
    elif name == "echo":
        told["bytes"] = len(body)
    elif name == "event":
        # As a payment provider, which knows a request again by its key.
        with contextlib.suppress(FileExistsError):
            Path(f"effect-{claim.derived_key('charge')}").touch(exist_ok=False)
        time.sleep(0.005)
    return status, headers, [json.dumps(told).encode()]


def work_later(key: str) -> None:
    assert current_claim() is None
    wait_to_go(key)
    Path(f"done-{key}").touch()


def claimed_key() -> str:
    claim = current_claim()
    assert claim is not None
    return claim.key


# Django --------------------------------------------------------------------------------------------------------------

#: The addresses of Django's application, which finds them here.
urlpatterns: list[Any] = []


def set_up_django(*, is_async: bool) -> None:
    from asgiref.sync import sync_to_async
    from django.conf import settings
    from django.http import HttpResponse, StreamingHttpResponse
    from django.urls import path

    sys.modules["tests.http.frameworks"] = sys.modules["__main__"]
    settings.configure(
        ALLOWED_HOSTS=["*"],
        INSTALLED_APPS=["celery_idempotent.django"],
        ROOT_URLCONF="tests.http.frameworks",
        SECRET_KEY="of tests",
        IDEMPOTENCY_HTTP={"scope": owner, **options()},
    )
    import django
    from celery import Celery

    django.setup()
    app = Celery("doors", broker="memory://", set_as_current=True)
    app.conf.idempotency_store = os.environ["STORE"]
    app.set_default()
    from celery_idempotent.django.http import idempotent_view

    def respond(request: Any, name: str, argument: str) -> Any:
        status, headers, parts = work(name, argument, request.body)
        kind: Any = HttpResponse if isinstance(parts, list) else StreamingHttpResponse
        return kind(
            b"".join(parts) if kind is HttpResponse else parts, status=status, headers=headers
        )

    async def respond_async(request: Any, name: str, argument: str) -> Any:
        return await sync_to_async(respond, thread_sensitive=False)(request, name, argument)

    view = idempotent_view(respond_async if is_async else respond)
    urlpatterns.append(path("<name>/sync", idempotent_view(respond), {"argument": "sync"}))
    urlpatterns.append(path("<name>/<argument>", view))


def django_wsgi() -> Any:
    set_up_django(is_async=False)
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()


def django_asgi() -> Any:
    set_up_django(is_async=True)
    from django.core.asgi import get_asgi_application

    return get_asgi_application()


# The others ----------------------------------------------------------------------------------------------------------


def guard(kind: str, app: Any) -> Any:
    module: Any = __import__(f"celery_idempotent.{kind}", fromlist=["*"])
    given = {**options(), "methods": ("POST", "PUT"), "paths": os.environ.get("PATHS", "/").split()}
    return module.IdempotencyMiddleware(app, store=os.environ["STORE"], scope=bearer_scope, **given)


def fastapi() -> Any:
    from fastapi import BackgroundTasks, Depends, FastAPI, Request
    from fastapi.responses import Response, StreamingResponse
    from starlette.middleware.base import BaseHTTPMiddleware

    app = FastAPI()

    async def untouched(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    async def content(request: Request) -> bytes:
        return await request.body()

    # FastAPI would look for the names in the module.
    content.__annotations__["request"] = Request

    def respond(name: str, argument: str, tasks: Any, body: bytes = Depends(content)) -> Any:
        status, headers, parts = work(name, argument, body)
        if name == "later":
            tasks.add_task(work_later, claimed_key())
        if isinstance(parts, list):
            return Response(b"".join(parts), status, headers)
        return StreamingResponse(parts, status, headers)

    respond.__annotations__["tasks"] = BackgroundTasks
    app.add_api_route("/{name}/{argument}", respond, methods=["POST", "PUT"])
    # One within and one around: each of Starlette's has streams of its own.
    app.add_middleware(BaseHTTPMiddleware, dispatch=untouched)
    app.add_middleware(lambda inner: guard("asgi", inner))
    app.add_middleware(BaseHTTPMiddleware, dispatch=untouched)
    return app


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def respond(request: Any) -> Any:
        name, argument = request.path_params.values()
        body = await request.body()
        status, headers, parts = await asyncio.to_thread(work, name, argument, body)
        later = BackgroundTask(work_later, claimed_key()) if name == "later" else None
        if isinstance(parts, list):
            return Response(b"".join(parts), status, headers, background=later)
        return StreamingResponse(parts, status, headers)

    routes = [Route("/{name}/{argument}", respond, methods=["POST", "PUT"])]
    return guard("asgi", Starlette(routes=routes))


def flask() -> Any:
    from flask import Flask, Response, request

    app = Flask(__name__)

    @app.route("/<name>/<argument>", methods=["POST", "PUT"])
    def respond(name: str, argument: str) -> Response:
        status, headers, parts = work(name, argument, request.get_data())
        response = Response(parts, status, headers)
        if name == "later":
            key = claimed_key()
            response.call_on_close(lambda: work_later(key))
        return response

    app.wsgi_app = guard("wsgi", app.wsgi_app)  # type: ignore[method-assign]
    return app


if __name__ == "__main__":
    threads = int(os.environ.get("THREADS", "16"))
    from django.core.asgi import get_asgi_application

    serve = {
        "site": partial(uvicorn, get_asgi_application),
        "django-wsgi": partial(gunicorn, django_wsgi, threads=threads),
        "django-asgi": partial(uvicorn, django_asgi),
        "fastapi": partial(uvicorn, fastapi),
        "starlette": partial(hypercorn, starlette),
        "flask": partial(gunicorn, flask, threads=threads),
    }
    serve[sys.argv[1]]()
