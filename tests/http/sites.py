"""The test project as a running site: a server, a worker, a Redis, and a client that asks them."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.preloaded import Process, spawn
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import Worker, child_environment, freeze_group

__all__ = [
    "ORDER",
    "Answer",
    "Site",
    "Web",
    "new_key",
    "open_site",
]

ORDER = {"amount": 100, "currency": "EUR", "recipient": "acct_1"}


def new_key() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replayed(self) -> bool:
        return self.headers["Idempotent-Replayed"] == "true"

    def problem(self) -> tuple[int, str]:
        """Return status and code of a problem, once it is seen to be a whole one."""
        assert self.headers["Content-Type"] == "application/problem+json", self.body
        told = self.json
        assert told["status"] == self.status
        assert told["title"]
        assert told["detail"]
        assert told["type"]
        assert isinstance(told["retryable"], bool)
        return self.status, told["code"]


class Web:
    """A web server process of the project, to be asked, killed and started again."""

    def __init__(self, command: list[str], directory: Path, env: dict[str, str], name: str) -> None:
        self.port_file = directory / f"{name}.port"
        self.log = directory / f"{name}.log"
        self._command = [*command, str(self.port_file)]
        self._directory, self._env = directory, env
        self._process: Process | subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Web:
        self.port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = spawn(self._command, cwd=self._directory, env=self._env, log=log)
        wait_for(self.port_file.exists, 60, lambda: f"the web server: {self.log.read_text()}")
        self.port = int(self.port_file.read_text())
        return self

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def freeze(self) -> None:
        freeze_group(self.pid)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | bytes | list[str] | None = None,
        user: str | None = "alice",
        timeout: float = 60,
        **headers: str,
    ) -> Answer:
        """Send one request; a dict is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.putrequest(method, path)
            if isinstance(body, (dict, list)):
                body = json.dumps(body).encode()
                headers.setdefault("content_type", "application/json")
            if user is not None:
                login = base64.b64encode(f"{user}:{user}".encode()).decode()
                connection.putheader("Authorization", f"Basic {login}")
            for each in key if isinstance(key, list) else [key]:
                if each is not None:
                    connection.putheader("Idempotency-Key", each)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def until(self, ask: Callable[[], Answer], *, other_than: int, timeout: float = 30) -> Answer:
        """Ask again and again until the status is another."""
        answers: list[Answer] = []

        def changed() -> bool:
            answers.append(ask())
            return answers[-1].status != other_than

        wait_for(changed, timeout, lambda: f"an answer other than {answers[-1]!r}")
        return answers[-1]


@dataclass
class Site:
    """All that runs."""

    directory: Path
    redis: EmbeddedRedis
    proxy: Proxy
    web: Web
    worker: Worker
    env: dict[str, str]
    mood_file: Path
    children: list[Web] = field(default_factory=list)

    def ask(self, *args: Any, **kwargs: Any) -> Answer:
        return self.web.ask(*args, **kwargs)

    def pay(self, order: Any = None, path: str = "/payments/", **kwargs: Any) -> Answer:
        return self.ask("POST", path, ORDER if order is None else order, **kwargs)

    def mood(self, word: str | None) -> None:
        """``"closed"``: payments stay in progress. ``"back"``: the bank is reachable."""
        if word is None:
            self.mood_file.unlink(missing_ok=True)
        else:
            draft = self.mood_file.with_suffix(".draft")
            draft.write_text(word)
            draft.rename(self.mood_file)

    @contextlib.contextmanager
    def bank(self, mood: str) -> Iterator[None]:
        self.mood(mood)
        try:
            yield
        finally:
            self.mood(None)

    def payments(self, key: str, user: str = "alice") -> int:
        """Count the payments that were made with a key."""
        made = self.ask("GET", "/payments/", user=user).json
        return sum(payment["key"] == key for payment in made)

    def status(self, answer: Answer, *, user: str | None = "alice", **headers: str) -> Answer:
        where = answer.headers["Location"] or answer.headers["Content-Location"]
        return self.ask("GET", where, user=user, **headers)

    def settled(self, answer: Answer, timeout: float = 30) -> Any:
        """Wait until what ``answer`` promised is done; return its status."""

        def look() -> Any:
            told = self.status(answer)
            assert told.status == 200, told.body
            return told.json if told.json["settled"] else None

        return wait_for(look, timeout, lambda: f"the end of it: {self.status(answer).body!r}")


@contextlib.contextmanager
def open_site(
    directory: Path,
    redis: EmbeddedRedis,
    *,
    db: int = 0,
    settings: str = "tests.http.settings",
    env: Mapping[str, str] | None = None,
) -> Iterator[Site]:
    """Start a site; its web server reaches Redis through a proxy, its worker does not."""
    mood_file = directory / "mood"
    common = {
        "DATABASE_PATH": str(directory / "db.sqlite3"),
        "DJANGO_SETTINGS_MODULE": settings,
        "DJANGO_ALLOWED_HOSTS": "127.0.0.1",
        "BANK_SECONDS": "0",
        "BANK_MOOD_FILE": str(mood_file),
        **(env or {}),
    }
    direct = child_environment({"REDIS_URL": redis.url(db), **common})
    with (directory / "users.log").open("wb") as log:
        users = [sys.executable, "-m", "testproject", "demo_users"]
        done = spawn(users, cwd=directory, env=direct, log=log).wait(60)
    assert done == 0, (directory / "users.log").read_text()
    with Proxy("127.0.0.1", redis.port) as proxy:
        through = child_environment({"REDIS_URL": f"redis://127.0.0.1:{proxy.port}/{db}", **common})
        web = Web([sys.executable, "-m", "testproject.web", "0"], directory, through, "web")
        worker = Worker(
            "testproject",
            directory=directory,
            concurrency=2,
            env={"REDIS_URL": redis.url(db), **common},
        )
        site = Site(directory, redis, proxy, web, worker, through, mood_file, [web])
        try:
            web.start()
            worker.start(timeout=60)
            yield site
        finally:
            for child in site.children:
                child.kill()
            worker.kill()
