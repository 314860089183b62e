"""An API of FastAPI under uvicorn, and of Flask under gunicorn: ``python -m tests.http.frameworks NAME PORT_FILE``.

Each endpoint counts its runs in a file. ``/held`` ends its first run when there is a file ``go-…``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import BackgroundTasks, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from flask import Flask, Response, jsonify, request
from gunicorn.app.base import BaseApplication
from starlette.middleware.base import BaseHTTPMiddleware

from celery_idempotent import asgi, current_claim, wsgi

__all__ = ["LEASE", "PIECES"]

LEASE = 2.0
#: The parts of a response that is too large to be stored, and their size.
PIECES = 8, 1000


def ran() -> tuple[int, str]:
    """Note a run, and return how many there were with its key, and the key."""
    claim = current_claim()
    assert claim is not None
    with Path(f"runs-{claim.key}").open("ab") as file:
        file.write(b"x")
        return file.tell(), claim.key


def may_end(number: int, key: str) -> bool:
    return number > 1 or Path(f"go-{key}").exists()


def pieces() -> Iterator[bytes]:
    ran()
    for number in range(PIECES[0]):
        yield b"%d" % number * PIECES[1]


def options(module: Any) -> dict[str, Any]:
    """Return the options of either middleware."""
    return {
        "store": os.environ["STORE"],
        "scope": module.bearer_scope,
        "lease": LEASE,
        "max_response_bytes": 3000,
        "max_request_bytes": 100_000,
    }


def fastapi_app() -> Any:
    app = FastAPI()

    async def untouched(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    # One within and one around: each of Starlette's has streams of its own.
    app.add_middleware(BaseHTTPMiddleware, dispatch=untouched)
    app.add_middleware(asgi.IdempotencyMiddleware, **options(asgi))
    app.add_middleware(BaseHTTPMiddleware, dispatch=untouched)

    @app.post("/plain")
    def plain() -> JSONResponse:
        body = {"run": ran()[0], "nonce": os.urandom(8).hex()}
        return JSONResponse(body, 201, {"Location": "/things/1"})

    @app.post("/held")
    async def held() -> dict[str, int]:
        number, key = ran()
        while not may_end(number, key):
            await asyncio.sleep(0.01)
        return {"run": number}

    @app.post("/large")
    def large() -> StreamingResponse:
        return StreamingResponse(pieces())

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"run": ran()[0], "bytes": len(await request.body())}

    @app.post("/later")
    def later(tasks: BackgroundTasks) -> dict[str, int]:
        number, key = ran()

        def work() -> None:
            assert current_claim() is None
            while not may_end(number, key):
                time.sleep(0.01)
            Path(f"done-{key}").touch()

        tasks.add_task(work)
        return {"run": number}

    return app


def flask_app() -> Any:
    app = Flask(__name__)

    @app.post("/plain")
    def plain() -> Any:
        body = {"run": ran()[0], "nonce": os.urandom(8).hex()}
        return jsonify(body), 201, {"Location": "/things/1"}

    @app.post("/held")
    def held() -> dict[str, int]:
        number, key = ran()
        while not may_end(number, key):
            time.sleep(0.01)
        return {"run": number}

    @app.post("/large")
    def large() -> Response:
        return Response(pieces())

    @app.post("/echo")
    def echo() -> dict[str, int]:
        return {"run": ran()[0], "bytes": len(request.get_data())}

    @app.post("/later")
    def later() -> Response:
        number, key = ran()
        response = jsonify({"run": number})

        @response.call_on_close
        def work() -> None:
            assert current_claim() is None
            while not may_end(number, key):
                time.sleep(0.01)
            Path(f"done-{key}").touch()

        return response

    app.wsgi_app = wsgi.IdempotencyMiddleware(app.wsgi_app, **options(wsgi))  # type: ignore[method-assign]
    return app


def tell(port: int) -> None:
    draft = Path(sys.argv[2]).with_suffix(".draft")
    draft.write_text(str(port))
    draft.rename(sys.argv[2])


def serve_fastapi() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    tell(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(fastapi_app(), log_level="info")).run([listening])


def serve_flask() -> None:
    class Site(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
        def load_config(self) -> None:
            given: dict[str, Any] = {"bind": "127.0.0.1:0", "threads": 8, "worker_class": "gthread"}
            given["when_ready"] = lambda arbiter: tell(arbiter.LISTENERS[0].sock.getsockname()[1])
            if "control_socket_disable" in self.cfg.settings:  # from 25 on
                given["control_socket_disable"] = True
            for name, value in given.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            return flask_app()

    Site().run()


if __name__ == "__main__":
    {"fastapi": serve_fastapi, "flask": serve_flask}[sys.argv[1]]()
