"""A web process is killed at each step of an operation: it has happened or it has not, and there is a note of it."""

from __future__ import annotations

import http.client
import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import pytest
import redis

from celery_idempotent.celery import reaper
from celery_idempotent.records import ClaimRequest, Record, ReserveRequest, Settled, State
from celery_idempotent.stores import Store, open_store
from tests.admin.pages import address
from tests.http.sites import Web
from tests.sql import databases as sql
from tests.support.admin import TASK, claim, identity, make_app, settle
from tests.support.servers import need
from tests.support.waiting import wait_for
from tests.support.workers import child_environment


@dataclass
class Admin:
    """The server, the store that it works on and the test's own way to it."""

    web: Web
    alias: str
    redis_url: str
    kind: str
    store: Any
    queue: str

    @property
    def url(self) -> str:
        """The store, as the server knows it."""
        return _url(self.kind, self.redis_url, "default")

    def app(self) -> Any:
        broker = {"broker_url": self.redis_url, "task_default_queue": self.queue}
        return make_app(self.store, **broker)

    def messages(self) -> int:
        with redis.Redis.from_url(self.redis_url) as client:
            return int(client.llen(self.queue))  # type: ignore[arg-type]

    def notes(self, key: str) -> list[str]:
        found = sql.rows(
            self.alias,
            "SELECT change_message FROM django_admin_log WHERE object_repr = %s ORDER BY id",
            (str(identity(key)),),
        )
        return [message for (message,) in found]

    def ask(self, key: str, operation: str, seen: Record, die: str | None = None) -> int | None:
        """Do it; the status of the answer, ``None`` if the process died before there was one."""
        from celery_idempotent.django.admin.operations import Mark

        form = {"live": str(Mark.of(seen)), "force": "on", "again": "on", "confirmed": "1"}
        form["reason"] = "a test"
        if operation == "complete":
            form["value"] = "17"
        headers: dict[str, Any] = {"X-Store": self.url, "X-Queue": self.queue}
        if die is not None:
            headers["X-Die"] = die
        try:
            return self.web.ask(
                "POST",
                address(key, operation),
                urlencode(form).encode(),
                user=None,
                content_type="application/x-www-form-urlencoded",
                **headers,
            ).status
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return None


def _url(kind: str, redis_url: str, alias: str) -> str:
    return {
        "redis": redis_url,
        "sql": f"django://{alias}",
        "hybrid": f"hybrid+{redis_url}?truth={alias}",
    }[kind]


@pytest.fixture(scope="module")
def served(
    project: None, databases: Iterator[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Web, str, str]]:
    need(sql.available("postgresql"), "a server of postgresql")
    directory, redis_url = tmp_path_factory.mktemp("mortal"), next(databases)
    with sql.database("postgresql", directory) as settings:
        alias = sql.add_alias("mortal", settings)
        env = child_environment(
            {
                "DJANGO_SETTINGS_MODULE": "tests.http.settings",
                "DJANGO_ALLOWED_HOSTS": "127.0.0.1",
                "TEST_DATABASE": json.dumps(settings),
                "BROKER": redis_url,
            }
        )
        web = Web([sys.executable, "-m", "tests.admin.mortal"], directory, env, "mortal")
        try:
            yield web.start(), alias, redis_url
        finally:
            web.kill()
            sql.drop_alias(alias)


#: The hybrid store has the steps of both others between which a process can die.
STORES = (
    "hybrid",
    pytest.param("redis", marks=pytest.mark.wide),
    pytest.param("sql", marks=pytest.mark.wide),
)


@pytest.fixture(params=STORES)
def admin(request: pytest.FixtureRequest, served: tuple[Web, str, str]) -> Iterator[Admin]:
    web, alias, redis_url = served
    store = open_store(_url(request.param, redis_url, alias))
    yield Admin(web, alias, redis_url, request.param, store, f"queue.{uuid.uuid4().hex}")
    store.close()


def bring_to(admin: Admin, key: str, state: str) -> Record:
    """Bring a key into a state, ``"STALE"`` for PROCESSING whose lease ran out."""
    store: Store = admin.store
    if state == "QUEUED":
        store.reserve(
            ReserveRequest(identity=identity(key), task_id=key, deadline_ms=60_000, keep_ms=60_000)
        )
    else:
        task = admin.app().tasks[TASK]
        message = task.idempotency_definition().codec.dump_message(task.s(key).set(task_id=key))
        lease_ms = 1 if state == "STALE" else 600_000
        record = claim(store, key, lease_ms=lease_ms, message=message, task_id=key)
        if state == "INTERRUPTED":
            store.interrupt(record.identity, token=record.token)
        elif state in ("COMPLETED", "FAILED"):
            settle(store, record, State[state])
        elif state == "STALE":
            wait_for(lambda: store.stats().stale, what="a lease that ran out")
    found = store.get(identity(key))
    assert found is not None
    return found


#: What each operation writes to the store, and what the record is then.
WRITES = {
    "complete": ("settle", State.COMPLETED),
    "release": ("release", None),
    "fail": ("settle", State.FAILED),
    "forget": ("forget", None),
    "requeue": ("requeue", State.QUEUED),
}


@pytest.mark.parametrize(
    ("operation", "state"),
    [
        ("release", "LIVE"),
        ("complete", "STALE"),
        pytest.param("complete", "LIVE", marks=pytest.mark.wide),
        ("complete", "FAILED"),
        ("fail", "LIVE"),
        ("forget", "COMPLETED"),
        ("requeue", "INTERRUPTED"),
        # The same steps from another state, which test_operations.py has.
        pytest.param("release", "QUEUED", marks=pytest.mark.wide),
        pytest.param("fail", "QUEUED", marks=pytest.mark.wide),
        pytest.param("requeue", "STALE", marks=pytest.mark.wide),
        pytest.param("requeue", "LIVE", marks=pytest.mark.wide),
    ],
)
def test_a_process_that_is_killed_has_done_it_or_not(
    admin: Admin, operation: str, state: str
) -> None:
    verb, then = WRITES[operation]
    untouched = ["before note", f"before {verb}"]
    done = [f"after {verb}", "before end"]
    if operation == "requeue":
        done[1:1] = ["before publish", "after publish"]
    if admin.kind == "hybrid" and (operation == "forget" or state == "FAILED"):
        untouched += ["after cache.bury"]
        done += [f"after truth.{verb}", "before cache.lift"]
    for place in untouched + done:
        key = f"{operation} {state} {uuid.uuid4().hex}"
        seen = bring_to(admin, key, state)
        assert admin.ask(key, operation, seen, die=place) is None, place
        found = admin.store.get(identity(key))
        notes = admin.notes(key)
        assert len(notes) == (place != "before note"), place
        if place != "before note":
            assert "begun, and it is not known how it ended" in notes[0], place
        if place in untouched:
            assert found == seen, place
            assert admin.ask(key, operation, seen) == 302
            found = admin.store.get(identity(key))
        assert (found and found.state) is then, place
        if found is not None:
            assert found.token > seen.token
        if operation.startswith("complete"):
            assert found is not None
            assert found.note.endswith(": a test"), place
        if operation == "requeue":
            unpublished = {f"after {verb}", "before publish"}
            _published_in_the_end(admin, at_once=place not in unpublished)
        admin.store.forget(identity(key))


def _published_in_the_end(admin: Admin, *, at_once: bool) -> None:
    """What the dead process did not publish, a sweep does."""
    if not at_once:
        assert admin.messages() == 0

        def swept() -> int:
            reaper.sweep(admin.app())
            return admin.messages()

        wait_for(swept, what="a message")
    assert admin.messages() == 1
    with redis.Redis.from_url(admin.redis_url) as client:
        client.delete(admin.queue)


@pytest.mark.parametrize("admin", ["hybrid"], indirect=True)
def test_a_tombstone_whose_operator_died_hides_nothing(admin: Admin) -> None:
    seen = bring_to(admin, "buried", "COMPLETED")
    assert admin.ask("buried", "forget", seen, die="after cache.bury") is None
    answer = admin.store.claim(
        ClaimRequest(
            identity=identity("buried"),
            attempt=b"attempt1",
            lease_ms=1000,
            keep_ms=1000,
            task_id="another",
        )
    )
    assert isinstance(answer, Settled)
    assert admin.ask("buried", "forget", seen) == 302
    assert claim(admin.store, "buried").attempts == 1
