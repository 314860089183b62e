"""Sets the stage: a server, a database, and the receiver's three processes; strikes it afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from testproject.demo.processes import Child, DemoError
from testproject.demo.scene import Scene
from testproject.embedded import EmbeddedRedis, ServerUnavailable
from testproject.postgres import EmbeddedPostgres

__all__ = ["Stage", "open_stage"]

_START_S = 30.0
_STOP_S = 3.0


class Stage:
    """The parts of a running receiver."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        *,
        scene: Scene,
        processes: int,
        database: Mapping[str, str],
    ) -> None:
        self.directory = directory
        self.redis_url = redis_url
        self.scene = scene
        self.secret = secrets.token_hex(16)
        self.keep = False
        self.outcomes = directory / "outcomes.log"
        self._port_file = directory / "port"
        env = {
            "DJANGO_ALLOWED_HOSTS": "127.0.0.1",
            "DJANGO_DEBUG": "0",
            "DJANGO_SECRET_KEY": secrets.token_hex(32),
            "DJANGO_SETTINGS_MODULE": "testproject.demo.settings",
            "GITHUB_WEBHOOK_SECRET": self.secret,
            "REDIS_URL": redis_url,
            "IDEMPOTENCY_STORE": scene.store_url(redis_url),
            **database,
            "TESTPROJECT_DEMO": str(directory),
        }
        os.environ.update(env)
        celery = ("-A", "testproject")
        self.web = Child(
            "web", "testproject.demo.web", str(self._port_file), directory=directory, env=env
        )
        self.worker = Child(
            "worker",
            "celery",
            *(*celery, "worker", "--pool", "prefork", "--concurrency", str(processes)),
            *("--queues", "celery,housekeeping", "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle"),
            directory=directory,
            env=env,
        )
        self.beat = Child(
            "beat",
            "celery",
            *(*celery, "beat", "--schedule", str(directory / "beat"), "--pidfile=", "-l", "INFO"),
            directory=directory,
            env=env,
        )

    @property
    def children(self) -> tuple[Child, ...]:
        return self.beat, self.web, self.worker

    def prepare_database(self) -> None:
        """Let this process see the database, and make its tables."""
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)

    def wait_for_web(self) -> int:
        """Return the port of the web server, once it accepts requests."""
        deadline = time.monotonic() + _START_S
        while not self._port_file.exists():
            self.web.check()
            if time.monotonic() > deadline:
                raise DemoError("the web server did not start")
            time.sleep(0.02)
        return int(self._port_file.read_text())

    def check(self) -> None:
        """Raise :exc:`DemoError` if a process ended that was not killed on purpose."""
        for child in self.children:
            child.check()

    def stop(self) -> None:
        """Stop whatever runs, all of it, whatever happens meanwhile."""
        for child in self.children:
            child.terminate()
        with contextlib.ExitStack() as each:
            for child in self.children:
                each.callback(child.stop, grace_s=_STOP_S)

    def remove(self) -> None:
        """Remove the directory, unless it is to be kept."""
        if not self.keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def tails(self) -> str:
        """The ends of the logs, for when something went wrong."""
        logs = ((child.log, child.tail()) for child in self.children)
        return "\n\n".join(f"--- {path}\n{text}" for path, text in logs if text)


@contextlib.contextmanager
def open_stage(*, processes: int, store: str, database: str | None) -> Iterator[Stage]:
    """Start the servers and make a directory; in the end stop everything, and remove it all.

    With ``stage.keep`` the directory stays. Raises :exc:`DemoError` if there is no server to start.
    """
    directory = Path(tempfile.mkdtemp(prefix="celery-idempotent-demo-"))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(EmbeddedRedis())
            where = {"DATABASE_PATH": str(directory / "ledger.sqlite3"), "DATABASE_NAME": ""}
            postgres = _open_postgres(stack, store, database)
            if postgres is not None:
                where = {"DATABASE_NAME": "postgres", **postgres.environment()}
            scene = Scene(store=store, database="sqlite" if postgres is None else "postgresql")
            stage = Stage(
                directory, server.url(db=0), scene=scene, processes=processes, database=where
            )
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, ServerUnavailable):
                raise DemoError(str(error)) from error
            raise
        stack.callback(stage.remove)
        stack.callback(stage.stop)
        yield stage


def _open_postgres(
    stack: contextlib.ExitStack, store: str, database: str | None
) -> EmbeddedPostgres | None:
    """Start PostgreSQL if it is asked for, or would be good to have."""
    if database == "sqlite" or (database is None and store == "redis"):
        return None
    try:
        return stack.enter_context(EmbeddedPostgres())
    except ServerUnavailable:
        if database == "postgresql":
            raise
        return None
