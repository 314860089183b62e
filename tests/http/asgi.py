"""Serves the site by ASGI: ``python -m tests.http.asgi PORT_FILE``."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
from django.core.asgi import get_asgi_application

__all__: list[str] = []

if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    application = get_asgi_application()
    draft = Path(sys.argv[1]).with_suffix(".draft")
    draft.write_text(str(listening.getsockname()[1]))
    draft.rename(sys.argv[1])
    uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="info")).run([listening])
