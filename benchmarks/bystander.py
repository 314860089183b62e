"""Another client of the server: asks for little, often, and writes down how long it waits."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.session import ROOT, children_environment

__all__ = ["Bystander", "watching"]

_PAUSE_S = 0.0005
_SAMPLE = struct.Struct("=dd")


class Bystander:
    """What another client lived through."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def waits(self, windows: list[tuple[float, float]]) -> list[float]:
        """Return its waiting times, in milliseconds, for what it asked in these windows of ``time.perf_counter``."""
        data = self._path.read_bytes()
        samples = _SAMPLE.iter_unpack(data[: len(data) // _SAMPLE.size * _SAMPLE.size])
        return [
            waited * 1000
            for at, waited in samples
            if any(began <= at + waited and at <= ended for began, ended in windows)
        ]


@contextlib.contextmanager
def watching(port: int, directory: Path) -> Iterator[Bystander]:
    """Have another process ask all the time, while the block lasts."""
    path = directory / "waits"
    command = [sys.executable, "-m", "benchmarks.bystander", str(port), str(path)]
    process = subprocess.Popen(command, cwd=ROOT, env=children_environment())
    try:
        while not path.exists():
            time.sleep(0.01)
        yield Bystander(path)
    finally:
        process.terminate()
        process.wait()


def main(port: int, path: Path) -> None:
    """Ask until told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with path.open("wb", buffering=0) as file:
            while True:
                at = time.perf_counter()
                connection.sendall(b"PING\r\n")
                if not connection.recv(64):
                    return
                file.write(_SAMPLE.pack(at, time.perf_counter() - at))
                time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
