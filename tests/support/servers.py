"""The servers that tests talk to: found, started, or missed."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import redis
from kombu import Connection

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from testproject import embedded
else:
    # Loaded as a file: `import testproject` would start a Django project and its Celery app in the test process.
    _spec = importlib.util.spec_from_file_location("embedded", ROOT / "testproject/embedded.py")
    embedded = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(embedded)

__all__ = [
    "EmbeddedRedis",
    "RabbitMQ",
    "embedded",
    "embedded_redis",
    "need",
    "open_rabbitmq",
    "own_prefix",
    "shared_redis_url",
]

#: A server that already runs, to use instead of one of the tests' own.
URL_VARIABLE = "CELERY_IDEMPOTENT_REDIS_URL"
RABBITMQ_VARIABLE = "CELERY_IDEMPOTENT_RABBITMQ_URL"

_LOCAL_REDIS = "redis://127.0.0.1:6379/9"
_LOCAL_RABBITMQ = "amqp://guest:guest@127.0.0.1:5672//"


def need(available: object, what: str) -> None:
    """Skip the test when what it needs is missing; fail where ``CI`` is set, so that CI never passes by skipping."""
    if available:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and CI is set", pytrace=False)
    pytest.skip(f"{what} is missing")


@contextlib.contextmanager
def shared_redis_url() -> Iterator[str]:
    """Give the Redis for tests that keep to keys of their own: the named one, the machine's, or an embedded one."""
    named = os.environ.get(URL_VARIABLE)
    if named:
        need(_listening(named), f"the Redis of {URL_VARIABLE}")
        yield named
    elif _listening(_LOCAL_REDIS):
        yield _LOCAL_REDIS
    else:
        with embedded_redis() as server:
            yield server.url(9)


@contextlib.contextmanager
def own_prefix(client: redis.Redis) -> Iterator[str]:
    """Give a prefix for keys that nobody else uses, and delete those in the end."""
    name = f"test-{uuid.uuid4().hex}"
    try:
        yield name
    finally:
        keys = list(client.scan_iter(match=f"{name}*", count=1000))
        for start in range(0, len(keys), 500):
            client.delete(*keys[start : start + 500])


class EmbeddedRedis(embedded.EmbeddedRedis):
    """A server of the tests' own, which can be struck."""

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._launched is None or not self._launched.server_pid:
            raise embedded.ServerUnavailable("the server does not run")
        return self._launched.server_pid

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and keep its data directory."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def freeze(self) -> None:
        """Let the server hang: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """End :meth:`freeze`."""
        os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def embedded_redis(
    *, persistent: bool = False, options: dict[str, str] | None = None
) -> Iterator[EmbeddedRedis]:
    """Give a Redis of one's own, to be stopped, frozen, killed and brought back at will.

    ``persistent`` writes every change to disk, so that the data survives a kill.
    """
    kept = {"appendonly": "yes", "appendfsync": "always"} if persistent else {}
    try:
        server = EmbeddedRedis(prefer_path=True, options={**kept, **(options or {})})
    except embedded.ServerUnavailable as error:
        need(False, str(error))
        raise
    with server:
        try:
            yield server
        finally:
            # A result that is collected later tries for minutes to cancel its subscription at a server that is gone.
            gc.collect()


@dataclass
class RabbitMQ:
    """A RabbitMQ for one test session; ``url`` includes a virtual host of the session's own if that is possible."""

    url: str
    queues: list[str] = field(default_factory=list)

    def queue(self) -> str:
        """Return the name of a queue that nobody else uses; it is deleted at the end of the session."""
        self.queues.append(f"celery-idempotent-test-{uuid.uuid4().hex}")
        return self.queues[-1]

    def delete(self, *names: str) -> None:
        """Delete queues, with what is in them. A queue that does not exist is deleted already."""
        with Connection(self.url) as connection:
            for name in names:
                with contextlib.suppress(Exception), connection.channel() as channel:
                    channel.queue_delete(name)  # type: ignore[attr-defined]  # amqp has it


@contextlib.contextmanager
def open_rabbitmq() -> Iterator[RabbitMQ]:
    """Give the RabbitMQ that the environment names, else the machine's.

    A virtual host of one's own needs ``rabbitmqctl`` and the right to use it. Without it the default one serves: every
    test has a queue of its own anyway, and those are deleted at the end.
    """
    named = os.environ.get(RABBITMQ_VARIABLE)
    url = named or _LOCAL_RABBITMQ
    need(_listening(url, 5672), f"RabbitMQ ({RABBITMQ_VARIABLE}, or one on 127.0.0.1:5672)")
    vhost = None if named else _own_vhost(urlsplit(url).username or "guest")
    broker = RabbitMQ(f"{url.removesuffix('//')}/{vhost}" if vhost else url)
    try:
        yield broker
    finally:
        if vhost:
            _rabbitmqctl("delete_vhost", vhost)
        else:
            broker.delete(*broker.queues)


def _own_vhost(user: str) -> str | None:
    vhost = f"celery-idempotent-{uuid.uuid4().hex[:12]}"
    rights = {"user": user, "vhost": vhost, "configure": ".*", "write": ".*", "read": ".*"}
    # Both with one start of Erlang, which takes half a second of CPU.
    wanted = {"vhosts": [{"name": vhost}], "permissions": [rights]}
    if _rabbitmqctl("import_definitions", told=json.dumps(wanted)):
        return vhost
    _rabbitmqctl("delete_vhost", vhost)
    return None


def _rabbitmqctl(*arguments: str, told: str = "") -> bool:
    program = shutil.which("rabbitmqctl", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program, "--quiet", *arguments],
            input=told.encode(),
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _listening(url: str, default_port: int = 6379) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    try:
        address = (parts.hostname or "127.0.0.1", parts.port or default_port)
        with socket.create_connection(address, timeout=2):
            return True
    except OSError:
        return False
