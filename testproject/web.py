"""The project's HTTP server: ``python -m testproject.web PORT FILE``, with ``APP=fastapi`` FastAPI's."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler, StaticFilesHandler
from django.core.asgi import get_asgi_application
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application


def serve_django(port: int, port_file: Path) -> None:
    """Serve by Django's threaded server until killed; port 0 is one that the kernel chooses."""
    server = ThreadedWSGIServer(("127.0.0.1", port), WSGIRequestHandler)
    server.daemon_threads = True
    server.socket.listen(128)
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    _tell(server.server_port, port_file)
    server.serve_forever()


def serve_fastapi(port: int, port_file: Path) -> None:
    """Serve the API of FastAPI, and whatever it has not by Django."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    pages: Any = ASGIStaticFilesHandler(get_asgi_application())  # sets Django up, too
    from testproject.payments.fastapi import api

    api.mount("/", pages)
    _tell(listening.getsockname()[1], port_file)
    uvicorn.Server(uvicorn.Config(api, lifespan="off")).run([listening])


def _tell(port: int, port_file: Path) -> None:
    """Write down the port, once requests are accepted."""
    draft = port_file.with_suffix(".draft")
    draft.write_text(str(port))
    draft.rename(port_file)


if __name__ == "__main__":
    serve = serve_fastapi if os.environ.get("APP") == "fastapi" else serve_django
    serve(int(sys.argv[1]), Path(sys.argv[2]))
