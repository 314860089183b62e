"""Nothing is kept in a session, so a pooler may give each transaction another one."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.records import Claimed, Held, Identity, Lease, Settled, State, Stored
from tests.sql import databases
from tests.sql.databases import rows, shift
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.connections import Lines, Session
from celery_idempotent.django.store import DjangoStore

KEY = Identity(namespace="charge", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
#: What outlives its transaction, on PostgreSQL.
SESSION_STATE = re.compile(
    r"^\s*SET\s+(?!LOCAL)|\bPREPARE\b|\bLISTEN\b|\bWITH HOLD\b|\bTEMP|\bpg_advisory_lock\b"
    r"|\bDISCARD\b|set_config\([^)]*false\)",
    re.IGNORECASE,
)


def use_every_verb(store: DjangoStore) -> None:
    """Go through the life of a record, and see that each answer is what it should be."""

    def claim(**changes: Any) -> Any:
        asked = {"attempt": os.urandom(8), "lease_ms": 60_000, "keep_ms": 60_000, **changes}
        return store.claim(KEY, **asked)

    reserved = store.reserve(KEY, task_id="a", deadline_ms=60_000, keep_ms=60_000)
    assert reserved.record.state is State.QUEUED
    first = claim(on_stale="requeue", message=b"message").record
    assert isinstance(claim(), Held)
    lease = Lease(identity=KEY, token=first.token, lease_ms=60_000, keep_ms=60_000)
    assert store.renew([lease]) == [True]
    assert store.checkpoint(KEY, token=first.token, name="pay", value=VALUE)
    assert store.interrupt(KEY, token=first.token) is not None
    assert store.requeue(KEY, deadline_ms=60_000) is not None
    shift(store, 60_001)
    assert len(store.sweep(limit=10).requeued) == 1
    assert store.release(KEY, token=claim().record.token)
    assert store.forget(KEY)
    assert store.release(KEY, token=claim().record.token)
    second = claim().record
    with store.transaction(second) as run:
        assert run.settle(state=State.COMPLETED, value=VALUE, keep_ms=60_000)
    assert isinstance(claim(), Settled)
    assert store.mark_delivered(KEY, token=second.token)
    shift(store, 60_001)
    third = claim()
    assert isinstance(third, Claimed)
    assert store.settle(third.record, state=State.FAILED, value=None, keep_ms=1)
    shift(store, 3_660_000)
    assert store.prune(limit=10) == 1
    assert store.get(KEY) is None


class Rotating(Session):
    """Another session for each statement that is no part of a transaction, as a pooler may give."""

    sessions: Iterator[Any]
    seen: list[str]
    staying = False

    def execute(self, sql: str, params: Sequence[Any] = ()) -> int:
        self._rotate(sql)
        return super().execute(sql, params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        self._rotate(sql)
        return super().rows(sql, params)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._rotate(self.words.begin)
        self.staying = True
        try:
            with super().transaction():
                yield
        finally:
            self.staying = False

    def _rotate(self, sql: str) -> None:
        self.seen.append(sql)
        if not self.staying:
            self.connection = next(self.sessions)


def test_every_statement_may_meet_another_session(
    open_store: Callable[..., DjangoStore], monkeypatch: pytest.MonkeyPatch
):
    store = open_store("postgresql")
    opened = [connections.create_connection(store.alias) for _ in range(3)]
    seen: list[str] = []
    members = {"sessions": itertools.cycle(opened), "seen": seen}
    rotating = type("Rotating", (Rotating,), members)
    words = store.lines.words(opened[0])

    @contextlib.contextmanager
    def session(self: Lines, *, fresh: bool) -> Iterator[Session]:
        yield rotating(opened[0], words, inside=False)

    monkeypatch.setattr(Lines, "_session", session)
    use_every_verb(store)
    assert len(seen) > 30
    assert [sql for sql in seen if SESSION_STATE.search(sql)] == []
    for connection in opened:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("0",)
            cursor.execute("SELECT count(*) FROM pg_prepared_statements")
            assert cursor.fetchone() == (0,)
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        connection.close()
    connections[store.alias].close()


def test_the_pattern_for_session_state_knows_it():
    for sql in ("SET lock_timeout = 5", "LISTEN x", "SELECT pg_advisory_lock(1)", "PREPARE a AS"):
        assert SESSION_STATE.search(sql)
    for sql in ("BEGIN; SET LOCAL x = 1", "UPDATE x SET y = 1", "SELECT pg_advisory_xact_lock(1)"):
        assert not SESSION_STATE.search(sql)


def test_behind_pgbouncer_in_transaction_mode(use_database: Callable[..., str], tmp_path: Path):
    binary = shutil.which("pgbouncer")
    if binary is None:
        pytest.skip("pgbouncer is missing")
    direct = use_database("postgresql")
    settings = dict(connections[direct].settings_dict)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    users, config = tmp_path / "users.txt", tmp_path / "pgbouncer.ini"
    users.write_text(f'"{settings["USER"]}" ""\n')
    lines = [
        "[databases]",
        f"{settings['NAME']} = host={settings['HOST']} port={settings['PORT']}",
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        f"listen_port = {port}",
        "auth_type = trust",
        f"auth_file = {users}",
        "pool_mode = transaction",
        "default_pool_size = 2",
        "unix_socket_dir =",
    ]
    if os.getuid() == 0:
        # It does not run as root.
        lines.append("user = nobody")
    config.write_text("\n".join(lines) + "\n")
    tmp_path.chmod(0o755)
    pooler = subprocess.Popen([binary, "-q", str(config)])
    try:
        alias = databases.add_alias("pooled", {**settings, "HOST": "127.0.0.1", "PORT": str(port)})

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(answers)
        store = DjangoStore(alias)
        use_every_verb(store)
        assert rows(alias, "SELECT 17") == [(17,)]
        store.close()
        databases.drop_alias(alias)
    finally:
        pooler.terminate()
        pooler.wait()
