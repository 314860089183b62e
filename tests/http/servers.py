"""The servers of the tests; ``python -m tests.http.servers PORT_FILE`` serves the site under ASGI."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["gunicorn", "hypercorn", "uvicorn"]

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


if __name__ == "__main__":
    from django.core.asgi import get_asgi_application

    uvicorn(get_asgi_application)
