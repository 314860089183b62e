"""The test project's admin as a web server, for a real browser: ``python -m tests.browser.server STORE_URL``.

Prints its address. Its pages may load nothing but what they bring along themselves: a strict Content-Security-Policy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

USERS = ("viewer", "operator")
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"


class ContentSecurityPolicy:
    """Adds the policy to every answer."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        """Answer with the policy."""
        answer = self.get_response(request)
        answer["Content-Security-Policy"] = POLICY
        return answer


def main(store: str) -> None:
    """Serve until killed."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    import django
    from django.conf import settings

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.MIDDLEWARE = [f"{__spec__.name}.ContentSecurityPolicy", *settings.MIDDLEWARE]
    django.setup()
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
    from django.core.wsgi import get_wsgi_application

    from tests.support.admin import PERMISSIONS, make_app, make_user

    settings.CELERY_IDEMPOTENT_APP = make_app(store)
    call_command("migrate", verbosity=0)
    for name, permissions in zip(USERS, (PERMISSIONS[:1], PERMISSIONS), strict=True):
        make_user(name, permissions, password=name)

    server = ThreadedWSGIServer(("127.0.0.1", 0), WSGIRequestHandler)
    server.daemon_threads = True
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
