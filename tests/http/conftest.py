"""One running site for all tests of the HTTP side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.sites import Site, open_site
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
