"""The webhook receiver answers as it says, enters each delivery once, and the demo's parts do their work."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.http import HttpResponse
    from django.test import Client

pytest.importorskip("django")

URL = "/webhooks/github/"
DELIVERY = "72d3162e-cc78-11e3-81ab-4c9367dc0958"
#: Port 1 is nobody's: a broker that is down.
NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The project's Celery app, with Django set up and the tables made; undone as far as that can be.

    Nothing of the project is imported before: a Celery app makes itself the current one, and looks at
    DJANGO_SETTINGS_MODULE, and other tests have apps of their own.
    """
    state: Any = importlib.import_module("celery._state")
    current = state._tls.current_app
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "testproject.settings")
        patch.setenv("DATABASE_PATH", str(tmp_path_factory.mktemp("django") / "db.sqlite3"))
        patch.setenv("REDIS_URL", NOBODY)
        import django

        django.setup()
        from django.conf import settings
        from django.test.utils import setup_databases, teardown_databases

        # No Redis here: tasks run where they are called, by the same protocol.
        settings.CELERY_TASK_ALWAYS_EAGER = True
        from testproject.celery import app

        usual, app.conf.idempotency_store = app.conf.idempotency_store, "memory://"
        databases = setup_databases(verbosity=0, interactive=False, aliases={"default": True})
        try:
            yield app
        finally:
            teardown_databases(databases, verbosity=0)
            app.conf.idempotency_store = usual
            state._set_current_app(current)


@pytest.fixture
def database(project: Any) -> Iterator[None]:
    """What a test writes is rolled back; the keys stay, so each test has a delivery of its own."""
    from django.db import transaction

    block: Any = transaction.atomic()
    block._from_testcase = (
        True  # as in a TestCase, whose transaction the code under test does not know of
    )
    with block:
        yield
        transaction.set_rollback(True)


@pytest.fixture
def client(database: None) -> Client:
    from django.test import Client

    return Client(SERVER_NAME="localhost")


def post(
    client: Client, body: bytes | None = None, *, delivery: str | None = None, **headers: Any
) -> HttpResponse:
    """Deliver, as GitHub does; ``headers`` replace the usual ones, an empty one removes it."""
    usual = {
        "HTTP_X_GITHUB_EVENT": "issues",
        "HTTP_X_GITHUB_DELIVERY": delivery or str(uuid.uuid4()),
    }
    sent: dict[str, Any] = {name: value for name, value in {**usual, **headers}.items() if value}
    answer: Any = client.generic(
        "POST",
        URL,
        b'{"action": "opened"}' if body is None else body,
        sent.pop("content_type", "application/json"),
        **sent,
    )
    response: HttpResponse = answer
    return response


def code_of(answer: HttpResponse) -> tuple[int, str]:
    assert answer["Content-Type"] == "application/problem+json"
    error = json.loads(answer.content)
    assert error["detail"]
    return answer.status_code, error["code"]


def entries(kind: str) -> list[Any]:
    from testproject.webhooks.models import LedgerEntry

    return list(LedgerEntry.objects.filter(kind=kind).order_by("pk"))


# The endpoint ---------------------------------------------------------------------------------------------------------


def test_a_delivery_that_comes_three_times_is_entered_once_by_the_idempotent_task_only(
    client: Client,
) -> None:
    delivery = str(uuid.uuid4())
    answers = [post(client, delivery=each) for each in (delivery, delivery.upper(), delivery)]
    assert [answer.status_code for answer in answers] == [202] * 3
    (entry,) = entries("idempotent")
    assert json.loads(answers[0].content)["tasks"]["idempotent"] == entry.task_id
    assert (str(entry.delivery_id), entry.event, entry.action) == (delivery, "issues", "opened")
    assert len(entries("plain")) == 3
    page = client.get("/").content.decode()
    assert "2 too many" in page
    assert "no duplicates" in page


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"HTTP_X_GITHUB_EVENT": ""}, "invalid_event"),
        ({"HTTP_X_GITHUB_EVENT": "Push it"}, "invalid_event"),
        ({"HTTP_X_GITHUB_DELIVERY": "42"}, "invalid_delivery"),
        ({"HTTP_X_GITHUB_DELIVERY": DELIVERY + "\n"}, "invalid_delivery"),
        ({"body": b"{"}, "invalid_payload"),
        ({"body": b"[" * 100_000}, "invalid_payload"),
        ({"body": b"null"}, "invalid_payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_delivery_is_400_and_says_why(
    client: Client, change: dict[str, Any], code: str
) -> None:
    assert code_of(post(client, **change)) == (400, code)
    assert client.get(URL).status_code == 405
    assert not entries("plain")


# The settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deploy", [pytest.param(False, marks=pytest.mark.wide), True])
def test_the_system_checks_find_what_is_wrong_with_tasks_that_nobody_has_imported_yet(
    tmp_path: Path, *, deploy: bool
) -> None:
    (tmp_path / "unseen").mkdir()
    (tmp_path / "unseen" / "__init__.py").touch()
    (tmp_path / "unseen" / "tasks.py").write_text(
        "from celery import shared_task\n"
        "from celery_idempotent import IdempotentTask\n"
        "@shared_task(base=IdempotentTask, acks_late=False)\n"
        "def unseen(): ...\n"
    )
    (tmp_path / "checked.py").write_text(
        "from testproject.settings import *\n"
        "INSTALLED_APPS = ['unseen', 'celery_idempotent.django']\n"
        "ROOT_URLCONF = 'checked'\n"
        "urlpatterns = []\n"
        "CELERY_IDEMPOTENCY_STORE = 'redis://127.0.0.1:1/0'\n"
        "from django.core.checks import register\n"
        "register(lambda app_configs, **_: print('CHECKED') or [], 'idempotency')\n"
    )

    env = child_environment({"DJANGO_SETTINGS_MODULE": "checked", "DJANGO_SECRET_KEY": "no secret"})
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    command = (sys.executable, "-m", "django", "check", "--tag", "idempotency")

    def run() -> str:
        words = (*command, *("--deploy",) * deploy)
        found = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        return found.stdout + found.stderr

    said = run()
    assert "celery_idempotent.W002" in said
    assert "unseen.tasks.unseen" in said
    assert ("celery_idempotent.E006" in said) is deploy
    # To import tasks, Celery has Django check itself; not within its own checks.
    assert said.count("CHECKED") == 1
    (tmp_path / "checked.py").write_text(
        (tmp_path / "checked.py").read_text() + "CELERY_IDEMPOTENCY_STORE = 'nonsense://x'\n"
    )
    (tmp_path / "unseen" / "tasks.py").write_text("import nowhere\n")
    said = run()
    assert "celery_idempotent.E001" in said
    assert "No module named 'nowhere'" in said
    assert "Traceback" not in said


def test_the_migrations_are_those_of_the_models(database: None) -> None:
    from django.core.management import call_command

    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_serve_begins_with_a_record_in_each_state(project: Any, database: None) -> None:
    from django.core.management import call_command

    from celery_idempotent.celery.sweep import sweep
    from celery_idempotent.records import Selection, State
    from celery_idempotent.stores import get_store

    call_command("demo_users", records=True)
    store = get_store(project)
    wait_for(lambda: store.stats().stale, what="a lease that ran out")
    sweep(project)
    keys = frozenset({"paid", "refused", "running", "lost", "queued"})
    found = store.list(Selection(keys=keys), limit=50)
    assert {record.state for record in found.records} == set(State)
