"""What every benchmark is given: how long it may take, servers of its own, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from testproject import embedded
else:
    # Loaded as a file: `import testproject` would start a Django project and its Celery app.
    _path = Path(__file__).parent.parent / "testproject/embedded.py"
    _spec = spec_from_file_location("embedded", _path)
    embedded = module_from_spec(_spec)
    _spec.loader.exec_module(embedded)

ROOT = Path(__file__).resolve().parent.parent

Server = embedded.EmbeddedRedis
Launched = embedded.Launched


class BenchmarkError(RuntimeError):
    """A benchmark could not be run; its figures would mean nothing."""


@dataclass(slots=True)
class Session:
    """One run of the benchmarks."""

    quick: bool
    random: random.Random
    progress: Progress
    bar: TaskID

    def choose(self, *, quick: int, full: int) -> int:
        """Return how many: few for a look, many for a figure."""
        return quick if self.quick else full

    def steps(self, count: float, doing: str) -> None:
        """Start a stretch of the progress bar."""
        self.progress.reset(self.bar, total=count, description=doing)

    def step(self, count: float = 1) -> None:
        """Get on."""
        self.progress.advance(self.bar, count)

    @contextlib.contextmanager
    def server(self) -> Iterator[embedded.EmbeddedRedis]:
        """Run a server while the block lasts: the machine's own Redis if it has one, or the Valkey of a wheel."""
        try:
            server = Server(prefer_path=True)
        except embedded.ServerUnavailable as error:
            raise BenchmarkError(str(error)) from error
        with server:
            yield server

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """Give a directory that is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="celery-idempotent-bench-") as name:
            yield Path(name)

    def child(self, module: str, *arguments: object) -> Iterator[Any]:
        """Run a module of this package in a process of its own; yield what it prints, a JSON document a line."""
        command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
        environment = children_environment()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=ROOT, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                yield from map(json.loads, process.stdout)
            finally:
                process.stdout.close()
                if process.poll() is None:
                    process.terminate()
        if process.returncode:
            raise BenchmarkError(f"benchmarks.{module} ended with code {process.returncode}")


def children_environment(**more: object) -> dict[str, str]:
    """Return the environment for a worker or another child.

    Without Django, whose task class is another; and bytecode is kept, as where a package is installed.
    """
    left_out = ("DJANGO_SETTINGS_MODULE", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**environment, **{name: str(value) for name, value in more.items()}}


def machine(session: Session) -> Mapping[str, str]:
    """Describe what the figures were measured on; nothing that names the machine."""
    with session.server() as server, redis.Redis(port=server.port) as client:
        info: Any = client.info()
    release = info.get("valkey_version", info["redis_version"])
    engine = f"{info.get('server_name', 'redis')} {release} ({info['mem_allocator']})"
    about = {"Python": platform.python_version(), "cores": str(os.cpu_count()), "server": engine}
    for package in ("celery", "kombu", "redis", "hiredis"):
        about[package] = "not installed"
        with contextlib.suppress(PackageNotFoundError):
            about[package] = version(package)
    return about
