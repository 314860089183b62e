"""The servers that chaos strikes: its own, on free ports, each behind a proxy, ended by its process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import redis
from kombu import Connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.stores.servers import answers, form_cluster, free_port
from tests.support.proxy import Proxy
from tests.support.servers import embedded
from tests.support.waiting import wait_for

STORES = ("redis", "cluster", "sentinel", "postgresql", "mariadb", "hybrid")
BROKERS = ("redis", "rabbitmq")
_HOST = "127.0.0.1"

#: Adds the seconds in a file to the wall clock of a server, and leaves the machine's alone.
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *ahead;
__attribute__((constructor)) static void look(void) {
  ahead = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CHAOS_CLOCK"), O_RDONLY), 0);
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int answer = real(id, t);
  if (id == CLOCK_REALTIME && ahead && ahead != MAP_FAILED) t->tv_sec += *ahead;
  return answer;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec s;
  int answer = clock_gettime(CLOCK_REALTIME, &s);
  t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000;
  return answer;
}
"""


class Server:
    """A program that can be killed, frozen and started again, and the proxy before its port."""

    def __init__(
        self, kind: str, directory: Path, command: list[Any], port: int, ready: Callable[[], Any]
    ) -> None:
        # A write past the limit of a file's size fails then, as on a full disk, and does not end the program.
        self._command = ["sh", "-c", 'trap "" XFSZ; exec "$@"', "sh", *map(str, command)]
        self.kind, self.port, self._ready = kind, port, ready
        self._directory = directory / f"{kind}{port}"
        self._directory.mkdir(exist_ok=True)
        self.proxy = Proxy(_HOST, port)
        self.start()

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._launched: embedded.Launched | None = embedded.Launched(
                self._command, directory=self._directory, log=log, gentle="SIGKILL"
            )
        wait_for(self._is_ready, 90, f"{self.kind} on {self.port}")

    def _is_ready(self) -> bool:
        with contextlib.suppress(Exception):
            return bool(self._ready())
        return False

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._launched is not None and self._launched.server_pid:
                main = psutil.Process(self._launched.server_pid)
                return [main, *main.children(recursive=True)]
        return []

    def signal(self, number: signal.Signals) -> None:
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would; its data stay."""
        left, launched = self.processes(), self._launched
        self.signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=10)
        if launched is not None:
            launched.kill()
            self._launched = None

    def client(self) -> redis.Redis:
        """Return a client of a Redis that no fault of the network meets; it asks once."""
        return redis.Redis(port=self.port, socket_timeout=10, retry=Retry(NoBackoff(), 0))


class Servers:
    """A store and a broker to be struck, and a Redis for results that nothing strikes."""

    def __init__(self, store: str, broker: str, directory: Path) -> None:
        directory.chmod(0o755)
        self.directory = directory
        self._all: list[Server] = []
        self.stores: list[Server] = []
        #: The settings of Django's database, through the proxy and past it.
        self.databases: dict[str, dict[str, Any]] = {}
        self._clock = directory / "clock"
        self._clock.write_bytes(bytes(8))
        compiler = shutil.which("cc")
        #: Before a command: its clock can be stepped, where there is a compiler.
        self.shifted: list[Any] = []
        if compiler:
            (directory / "clock.c").write_text(_CLOCK)
            command: list[Any] = [compiler, "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
            subprocess.run(command, check=True, cwd=directory)
            self.shifted = ["env", f"LD_PRELOAD={directory}/clock.so", f"CHAOS_CLOCK={self._clock}"]
        try:
            self.results = self._redis()
            self.broker = self._redis() if broker == "redis" else self._rabbitmq()
            self.store_url: str = getattr(self, f"_open_{store}")()
        except BaseException:
            self.close()
            raise
        port = self.broker.proxy.port
        scheme, path = ("redis", "0") if broker == "redis" else ("amqp", "/")
        self.broker_url = f"{scheme}://{_HOST}:{port}/{path}"

    def close(self) -> None:
        for each in self._all:
            each.proxy.close()
            each.kill()

    def set_clock(self, ahead: int) -> None:
        with self._clock.open("r+b") as file:  # in place: the servers have it mapped
            file.write(ahead.to_bytes(8, "little", signed=True))

    def _add(self, kind: str, command: list[Any], port: int, ready: Callable[[], Any]) -> Server:
        self._all.append(server := Server(kind, self.directory, command, port, ready))
        return server

    def _home(self, kind: str, port: int, user: str = "") -> Path:
        home = self.directory / f"{kind}{port}"
        home.mkdir()
        if user:
            shutil.chown(home, user)
        return home

    def _redis(self, *more: Any, before: list[Any] | None = None) -> Server:
        port = free_port()
        command = [*(before or []), "redis-server", "--port", port, "--bind", _HOST, "--save", ""]
        command += ["--dir", self._home("redis", port), "--appendonly", "yes", "--appendfsync"]
        command += ["always", "--busy-reply-threshold", 100, "--enable-debug-command", "yes"]
        client = redis.Redis(port=port, socket_timeout=2)
        return self._add("redis", [*command, *more], port, lambda: answers(client))

    def _rabbitmq(self) -> Server:
        port = free_port()
        home = self._home("rabbitmq", port)
        paths = ("MNESIA_BASE", "LOG_BASE", "PID_FILE", "ENABLED_PLUGINS_FILE", "CONFIG_FILE")
        env = {f"RABBITMQ_{name}": home / name.lower() for name in paths} | {
            "HOME": home,
            "RABBITMQ_NODENAME": f"chaos{port}@localhost",
            "RABBITMQ_NODE_PORT": port,
            "RABBITMQ_DIST_PORT": port + 10_000,
            "RABBITMQ_NODE_IP_ADDRESS": _HOST,
        }

        def ready() -> bool:
            with Connection(f"amqp://{_HOST}:{port}//", connect_timeout=2) as found:
                return bool(found.connect())

        command = ["env", *(f"{name}={value}" for name, value in env.items())]
        # The one on the PATH changes its user.
        program = _program("rabbitmq-server", "/usr/lib/rabbitmq/bin")
        return self._add("rabbitmq", [*command, program], port, ready)

    # -- stores --------------------------------------------------------------------------------------------------------

    def _open_redis(self) -> str:
        self.stores = [self._redis(before=self.shifted)]
        return f"redis://{_HOST}:{self.stores[0].proxy.port}/2"

    def _open_cluster(self) -> str:
        more = ("--cluster-enabled", "yes", "--cluster-node-timeout", 2000)
        self.stores = [self._redis(*more, before=self.shifted) for _ in range(3)]
        form_cluster([each.client() for each in self.stores], self.stores[0].port)
        return "redis+cluster://" + ",".join(f"{_HOST}:{each.port}" for each in self.stores)

    def _open_sentinel(self) -> str:
        self.stores = [self._redis(before=self.shifted) for _ in range(2)]
        master, replica = self.stores
        # By a command: after a restart it is what the Sentinel makes of it.
        replica.client().replicaof(_HOST, str(master.port))
        port, conf = free_port(), self.directory / "sentinel.conf"
        conf.write_text(
            f"port {port}\nbind {_HOST}\nsentinel monitor chaos {_HOST} {master.port} 1\n"
            "sentinel down-after-milliseconds chaos 1000\nsentinel failover-timeout chaos 2000\n"
        )
        self._sentinel = redis.Redis(port=port, socket_timeout=2)
        self._add("sentinel", ["redis-server", conf, "--sentinel"], port, self._sentinel.ping)
        ask = replica.client().info
        wait_for(lambda: ask("replication").get("master_link_status") == "up", 30, "the replica")
        return f"sentinel://{_HOST}:{port}/chaos/2"

    def depose(self) -> None:
        """Kill the server that takes writes; another is made the master."""
        found: Any = self._sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "chaos")
        self.deposed = next(each for each in self.stores if each.port == int(found[1]))
        self.deposed.kill()

    def two_masters(self) -> list[tuple[float, float]]:
        """Say when a master that was replaced still took writes: from the change until a Sentinel made it a replica.

        What a client with an open connection writes there is lost.
        """
        found, began = [], 0.0
        for home in self.directory.glob("sentinel[0-9]*"):
            for line in (home / "log").read_text(errors="replace").splitlines():
                stamp, _, event = line.partition(" # " if " # " in line else " * ")
                if event.startswith(("+switch-master", "+convert-to-slave")):
                    day = " ".join(stamp.split()[1:])
                    local = datetime.strptime(day, "%d %b %Y %H:%M:%S.%f")  # noqa: DTZ007
                    at = local.timestamp()
                    if began and event.startswith("+convert"):
                        found.append((began, at))
                    began = at if event.startswith("+switch") else 0.0
        return found

    def _open_postgresql(self) -> str:
        port, user = free_port(), "nobody" if os.geteuid() == 0 else ""
        home = self._home("postgres", port, user)
        become: list[Any] = ["setpriv", f"--reuid={user}", "--clear-groups"] if user else []
        places = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))
        init = [*become, _program("initdb", *places[-1:]), "-D", home / "data", "-N"]
        subprocess.run(
            [*init, "-U", "tests", "-E", "UTF8"], check=True, capture_output=True, cwd="/"
        )
        command = [*become, *self.shifted, _program("postgres", *places[-1:]), "-D", home / "data"]
        command += ["-p", port, "-h", _HOST, "-k", home, "-F"]  # it survives the crash of a process
        return self._open_database(
            "postgres", command, port, "SELECT 1", ENGINE="django.db.backends.postgresql",
            NAME="postgres", USER="tests", OPTIONS={"connect_timeout": 3},
        )  # fmt: skip

    def _open_mariadb(self) -> str:
        port, user = free_port(), "mysql" if os.geteuid() == 0 else ""
        home = self._home("mariadbd", port, user)
        common = ["--no-defaults", f"--datadir={home}/data", *([f"--user={user}"] if user else [])]
        install = [_program("mariadb-install-db"), *common, "--skip-test-db"]
        install += ["--auth-root-authentication-method=normal"]
        subprocess.run(install, check=True, capture_output=True)
        command = [*self.shifted, _program("mariadbd"), *common, f"--port={port}"]
        command += [f"--bind-address={_HOST}", f"--socket={home}/socket", f"--pid-file={home}/pid"]
        return self._open_database(
            "mariadbd", command, port, "CREATE DATABASE IF NOT EXISTS chaos CHARSET utf8mb4",
            ENGINE="django.db.backends.mysql", NAME="chaos", USER="root",
            OPTIONS={"connect_timeout": 3, "read_timeout": 10, "ssl_disabled": True},
        )  # fmt: skip

    def _open_database(
        self, kind: str, command: list[Any], port: int, sql: str, **settings: Any
    ) -> str:
        def ready() -> bool:
            if kind == "postgres":
                from psycopg import connect

                connection: Any = connect(f"host={_HOST} port={port} user=tests dbname=postgres")
            else:
                import pymysql

                connection = pymysql.connect(host=_HOST, port=port, user="root", ssl_disabled=True)
            with contextlib.closing(connection):
                connection.cursor().execute(sql)
            return True

        self.stores = [server := self._add(kind, command, port, ready)]
        for alias, place in (("default", server.proxy.port), ("direct", port)):
            self.databases[alias] = {**settings, "HOST": _HOST, "PORT": str(place)}
        return "django://"

    def _open_hybrid(self) -> str:
        self._open_postgresql()
        self.stores.append(self._redis(before=self.shifted))
        return f"hybrid+redis://{_HOST}:{self.stores[1].proxy.port}/2"


def _program(name: str, *places: str) -> str:
    path = os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/sbin"])
    if found := shutil.which(name, path=path):
        return found
    raise embedded.ServerUnavailable(f"{name} is missing: install its server, or choose another")
