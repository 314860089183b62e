"""Processes forked from one that has imported Celery already: a start of Python and Celery costs a second of CPU.

Two such servers serve a test process, each started when first asked for: one with what every worker imports, of the
package under test as well, and one with Django besides. Processes of one run share the imports: the first one starts a
server, and each has a fork of that. None has made an app, so that what they fork differs from a fresh interpreter in
nothing but in what is imported, and in that redis-py knows its own version. What imports do, and who imports what, is
tested in fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import redis.utils

_CELERY = """
celery.app.control celery.app.log celery.app.trace celery.apps.worker celery.backends.redis celery.bin.celery
celery.bin.worker celery.canvas celery.concurrency.prefork celery.events.receiver celery.events.state
celery.fixups.django celery.result celery.utils.timer2 celery.worker.autoscale celery.worker.components
celery.worker.consumer celery.worker.consumer.delayed_delivery celery.worker.control celery.worker.state
celery.worker.strategy kombu.matcher kombu.transport.pyamqp kombu.transport.redis redis.cluster redis.sentinel
billiard.heap billiard.sharedctypes billiard.synchronize email.message encodings.idna importlib.readers stringprep
unittest.mock zoneinfo
"""
#: A tenth of a second for each worker.
_PACKAGE = """
celery_idempotent.celery.checks celery_idempotent.celery.installation celery_idempotent.celery.sweep
celery_idempotent.celery.task celery_idempotent.celery.worker celery_idempotent.stores.memory
celery_idempotent.stores.redis.store
"""
_DJANGO = """
django.contrib.messages django.core.handlers.wsgi django.core.management django.core.management.base
django.db.backends.sqlite3.base django.db.models django.forms django.http django.template django.test django.urls
django.utils.translation django.views psycopg pymysql
"""


class Process:
    """What ``subprocess.Popen`` tells of a process, of one that another process forked."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self.pid = int(asked.recv(20))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._asked], (), (), timeout)[0]:
            self.returncode = int(self._asked.recv(20) or -signal.SIGKILL)
            self._asked.close()
        return self.returncode


def spawn(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: IO[bytes],
    fresh: bool = False,
) -> Process | subprocess.Popen[bytes]:
    """Start a program in a session of its own: by a fork, if it is ``python -m`` and not to be ``fresh``."""
    server = None
    if not fresh and tuple(command[:2]) == (sys.executable, "-m") and not _early(command):
        server = _server(django="DJANGO_SETTINGS_MODULE" in env)
    if server is None or _of_python(env) != server.of_python:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return server.fork([list(command[2:]), str(cwd), dict(env)], log)


def _early(command: Sequence[str]) -> bool:
    """Whether imports depend on how the program is started: patched for greenlets, or with a pool from outside."""
    pools = ("--pool=gevent", "--pool=eventlet", "--pool=custom")
    return any(each in pools or each.endswith(("gevent", "eventlet")) for each in command)


def _of_python(env: Mapping[str, str]) -> dict[str, str]:
    """Return what the interpreter itself reads when it starts."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_"))}


class _Server:
    """The side of the test process: a connection for each process, and one that keeps the server alive."""

    def __init__(self, modules: Sequence[str]) -> None:
        from tests.support.workers import child_environment

        env = child_environment()
        self.of_python = _of_python(env)
        self._process: subprocess.Popen[bytes] | None = None
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"of {os.getpid()}"
        known = repr((run, modules, sorted(self.of_python.items()))).encode()
        self._address = b"\0preloaded " + hashlib.sha256(known).digest()
        while True:
            with (
                _socket() as door,
                contextlib.suppress(OSError),
            ):  # another process of the run has it
                door.bind(self._address)
                door.listen(64)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.preloaded", str(door.fileno()), *modules],
                    env=env,
                    cwd="/",  # which is on its path
                    pass_fds=[door.fileno()],
                    start_new_session=True,
                )
            with contextlib.suppress(ConnectionRefusedError):  # it does not listen yet
                self._here = self._connect()
                break
            time.sleep(0.02)
        atexit.register(self.close)

    def fork(self, request: list[Any], log: IO[bytes]) -> Process:
        asked = self._connect()
        socket.send_fds(asked, [json.dumps(request).encode()], [log.fileno()])
        return Process(asked)

    def _connect(self) -> socket.socket:
        connection = _socket()
        connection.connect(self._address)
        return connection

    def close(self) -> None:
        self._here.close()
        if self._process is not None:
            self._process.wait()  # for the other processes of the run, too


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


_servers: dict[bool, _Server] = {}
_making = threading.Lock()


def _server(*, django: bool) -> _Server:
    with _making:  # a second connection of this process would have close() wait for ever
        if django not in _servers:
            modules = f"{_CELERY} {_PACKAGE} {_DJANGO if django else ''}"
            _servers[django] = _Server(modules.split())
        return _servers[django]


# -- the side of the server --------------------------------------------------------------------------------------------


def _serve(door: socket.socket) -> list[str]:
    """Fork for each connection until there is none; return in the program, with what it shall run."""
    door.settimeout(0.2)
    connections = 0
    while True:
        with contextlib.suppress(TimeoutError):
            asking, _ = door.accept()
            if os.fork() == 0:
                door.close()
                return _attend(asking)
            asking.close()
            connections += 1
        while connections and os.waitpid(-1, os.WNOHANG)[0]:
            connections -= 1
        if not connections:
            sys.exit()


def _attend(asking: socket.socket) -> list[str]:
    """Fork the program, and stay until it has ended or whoever asked for it is gone; return in the program."""
    request, fds, _, _ = socket.recv_fds(asking, 1 << 20, 1)
    if not fds:
        sys.exit()
    if (pid := os.fork()) == 0:
        asking.close()
        return _become(request, *fds)
    os.close(*fds)
    asking.send(str(pid).encode())
    if asking.fileno() in select.select([asking.fileno(), os.pidfd_open(pid)], (), ())[0]:
        for kill in (os.kill, os.killpg):  # it has a group of its own once it has come to setsid()
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        sys.exit()
    asking.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    sys.exit()


def _become(request: bytes, log: int) -> list[str]:
    os.setsid()
    arguments, cwd, env = json.loads(request)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    found: list[str] = arguments
    return found


def _main() -> NoReturn:
    door = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # what is not installed is not imported by anybody
            importlib.import_module(name)
    # redis-py reads the files of installed packages for it at each connection.
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)
    gc.collect()
    gc.freeze()
    module, *sys.argv[1:] = _serve(door)
    sys.path[0] = str(Path.cwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _main()
