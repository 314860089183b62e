"""The receiver's HTTP server: Django's threaded one, on a port that the kernel chooses."""

from __future__ import annotations

import sys
from pathlib import Path

from django.core.servers.basehttp import (
    ThreadedWSGIServer,
    WSGIRequestHandler,
    get_internal_wsgi_application,
)

__all__ = ["main"]


class _Server(ThreadedWSGIServer):
    request_queue_size = 128


def main(port_file: Path) -> None:
    """Serve until killed; the port is in ``port_file`` as soon as requests are accepted."""
    application = get_internal_wsgi_application()
    server = _Server(("127.0.0.1", 0), WSGIRequestHandler)
    server.daemon_threads = True
    server.set_app(application)
    draft = port_file.with_suffix(".draft")
    draft.write_text(str(server.server_port))
    draft.rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
