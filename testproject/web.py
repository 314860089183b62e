"""The project's HTTP server, Django's threaded one: ``python -m testproject.web PORT [FILE]``."""

from __future__ import annotations

import sys
from pathlib import Path

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.servers.basehttp import (
    ThreadedWSGIServer,
    WSGIRequestHandler,
    get_internal_wsgi_application,
)


class _Server(ThreadedWSGIServer):
    request_queue_size = 128
    daemon_threads = True


def main(port: int, port_file: Path | None = None) -> None:
    """Serve until killed; port 0 is one that the kernel chooses, told in ``port_file`` once requests are accepted."""
    server = _Server(("127.0.0.1", port), WSGIRequestHandler)
    server.set_app(StaticFilesHandler(get_internal_wsgi_application()))
    if port_file is not None:
        draft = port_file.with_suffix(".draft")
        draft.write_text(str(server.server_port))
        draft.rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
