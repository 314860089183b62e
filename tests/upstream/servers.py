"""Servers for the integration tests: a Redis of its own for each side, and a virtual host in RabbitMQ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.support.servers import embedded_redis, open_rabbitmq


@contextlib.contextmanager
def servers(broker: str, *, apart: bool = False) -> Iterator[list[dict[str, str]]]:
    """Give the environments of the two sides, which may run at the same time.

    Results and records are in one database, and written by one script; ``apart``: in two.
    """
    with contextlib.ExitStack() as stack:
        yield [_server(broker, stack, apart=apart) for _ in range(2)]


def _server(broker: str, stack: contextlib.ExitStack, *, apart: bool) -> dict[str, str]:
    redis = stack.enter_context(embedded_redis())
    parts = urlsplit(redis.url())
    url = redis.url(0) if broker == "redis" else stack.enter_context(open_rabbitmq()).url
    return {
        "TEST_BROKER": url,
        "TEST_BACKEND": redis.url(1),
        "REDIS_HOST": parts.hostname or "127.0.0.1",
        "REDIS_PORT": str(parts.port),
        "UPSTREAM_STORE": redis.url(2 if apart else 1),
    }
