"""The doors of tests/http/frameworks.py as running servers, and a client that says what it likes, byte by byte."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.http.middleware import bearer_scope
from celery_idempotent.http.requests import http_identity
from celery_idempotent.records import Identity
from celery_idempotent.stores import Store, open_store
from tests.http.frameworks import DOORS
from tests.http.sites import Answer, Web
from tests.support.proxy import Proxy
from tests.support.servers import embedded_redis
from tests.support.workers import child_environment

__all__ = ["Door", "Doors", "Headers", "make_door", "open_doors"]

Headers = list[tuple[str, str]]


class Wire:
    """A connection for one request, which need not be whole."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> None:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            *(f"{k}: {v}" for k, v in headers),
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(lines).encode("latin-1") + body)

    def stop(self) -> None:
        """Say that nothing more comes."""
        self.socket.shutdown(socket.SHUT_WR)

    def answer(self) -> Answer:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return Answer(response.status, response.headers, response.read())


@dataclass
class Door:
    """One server; requests are those of ``caller`` ann to ``/plain/x``, unless they say otherwise."""

    name: str
    web: Web
    store: Store

    @contextlib.contextmanager
    def connected(
        self,
        key: str | list[str] | None,
        path: str = "/plain/x",
        body: bytes = b"",
        *,
        method: str = "POST",
        caller: str | None = "ann",
        kind: str = "application/json",
        length: str | None = None,
        more: Headers | None = None,
    ) -> Iterator[Wire]:
        """Send a request, which need not be whole, and leave at the end."""
        keys = key if isinstance(key, list) else [key]
        headers = [("Idempotency-Key", each) for each in keys if each is not None]
        headers += [("Content-Type", kind), *(more or ())]
        if caller is not None:
            headers.append(("Authorization", f"Bearer {caller}"))
        if not dict(headers).get("Transfer-Encoding"):
            headers.append(("Content-Length", length or str(len(body))))
        wire = Wire(self.web.port)
        with contextlib.closing(wire.socket):
            wire.send(method, path, headers, body)
            yield wire

    def ask(self, *request: Any, **more: Any) -> Answer:
        """Send a request, and return the answer to it."""
        with self.connected(*request, **more) as wire:
            return wire.answer()

    def close(self) -> None:
        self.web.kill()
        self.store.close()

    def until(self, ask: Callable[[], Answer], *, other_than: int) -> Answer:
        return self.web.until(ask, other_than=other_than)

    def runs(self, key: str) -> int:
        path = self.file("runs", key)
        return path.stat().st_size if path.exists() else 0

    def file(self, kind: str, key: str) -> Path:
        return self.web.port_file.with_name(f"{kind}-{key}")

    def identity(self, key: str) -> Identity:
        """Return the identity of a key of ann's."""
        return http_identity("http", bearer_scope({"HTTP_AUTHORIZATION": "Bearer ann"}), key)


@dataclass
class Doors:
    """All of them, with records in one Redis, which they reach by a proxy."""

    proxy: Proxy
    all: dict[str, Door]

    def each(self, work: Callable[[Door], Any]) -> dict[str, Any]:
        """Do something at each door, at once."""
        with ThreadPoolExecutor(len(self.all)) as pool:
            return dict(zip(self.all, pool.map(work, self.all.values()), strict=True))


@contextlib.contextmanager
def open_doors(factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """Start all servers, and a Redis for them."""
    with embedded_redis() as redis, Proxy("127.0.0.1", redis.port) as proxy:
        doors = Doors(proxy, {})
        for name in DOORS:
            url = f"{redis.url()}?prefix={name}"
            behind = f"{proxy.url()}?prefix={name}"
            doors.all[name] = make_door(name, factory.mktemp(name), url, STORE=behind)
        try:
            doors.each(lambda door: door.web.start())
            yield doors
        finally:
            for door in doors.all.values():
                door.close()


def make_door(name: str, directory: Path, url: str, **env: str) -> Door:
    """Return a server that is not started yet, with records in the store with this URL."""
    command = [sys.executable, "-m", "tests.http.frameworks", name]
    web = Web(command, directory, child_environment({"STORE": url, **env}), "web")
    return Door(name, web, open_store(url))
