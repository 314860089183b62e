"""One running site for all tests of the HTTP side."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.http.sites import Site, Web, open_site
from tests.support.servers import embedded_redis


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with embedded_redis() as redis, open_site(tmp_path_factory.mktemp("site"), redis) as site:
        yield site


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    """The site, in its usual mood."""
    running.mood(None)
    yield running
    running.mood(None)


@pytest.fixture(scope="session")
def asgi(running: Site) -> Web:
    """The same site under an ASGI server."""
    command = [sys.executable, "-m", "tests.http.servers", "asgi"]
    web = Web(command, running.directory, running.env, "asgi")
    running.children.append(web)
    return web.start()
