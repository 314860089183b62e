"""Serves the site by gunicorn, which decodes chunked bodies: ``python -m tests.http.wsgi PORT_FILE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.wsgi import get_wsgi_application
from gunicorn.app.base import BaseApplication

__all__: list[str] = []


class _Site(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
    def load_config(self) -> None:
        self.cfg.set("bind", "127.0.0.1:0")
        self.cfg.set("workers", 1)
        if "control_socket_disable" in self.cfg.settings:  # from 25 on
            self.cfg.set("control_socket_disable", True)
        self.cfg.set("when_ready", _tell)

    def load(self) -> Any:
        return get_wsgi_application()


def _tell(arbiter: Any) -> None:
    draft = Path(sys.argv[1]).with_suffix(".draft")
    draft.write_text(str(arbiter.LISTENERS[0].sock.getsockname()[1]))
    draft.rename(sys.argv[1])


if __name__ == "__main__":
    _Site().run()
