"""The test project's settings, under a strict Content-Security-Policy."""

from __future__ import annotations

from testproject import settings as project
from testproject.settings import *  # noqa: F403

MIDDLEWARE = ["tests.browser.server.ContentSecurityPolicy", *project.MIDDLEWARE]
