"""What ``explain`` tells of histories in PostgreSQL: atomic tasks, requests over HTTP, a scope."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

import celery_idempotent
from tests.cli.histories import History, check, write
from tests.cli.projects import TASK, Project, open_project
from tests.sql import databases as own
from tests.support.waiting import wait_for
from tests.support.workers import Worker, child_environment

pytestmark = [pytest.mark.wide, pytest.mark.redis, pytest.mark.worker]

DELIVERY = "testproject.webhooks.tasks.record_delivery"

HISTORIES = [
    History(
        41,
        "An atomic task ran once; its database writes and its record were committed together.",
        ("is COMPLETED", "task t-41", "Kept until"),
    ),
    History(
        42,
        "A payment in the scope acme failed for good: the bank refused it (PaymentRefused).",
        ("in scope acme is FAILED for good with PaymentRefused", "Kept until"),
    ),
    History(
        43,
        "A request over HTTP ran once; a second one with its key got the stored answer.",
        ("in scope user", "is COMPLETED: it was answered", "the same answer"),
    ),
    History(
        44,
        "A request over HTTP is at work; a second one with its key was answered 409.",
        ("in scope user", "is PROCESSING", "answered 409", "task or request"),
    ),
    History(
        45,
        "A request over HTTP queued a payment (202); no worker has taken it.",
        ("in scope user", "is QUEUED", "no worker has it yet"),
    ),
    History(
        46,
        "Its worker was killed while it ran; within its lease alice failed it by force: paid by hand.",
        ("is FAILED for good: alice failed it", "paid by hand", "had not settled it"),
    ),
]

_REQUEST = """
import json, sys
import django
django.setup()
from django.contrib.auth.models import User
from django.test import Client
client = Client(SERVER_NAME="localhost")
client.force_login(User.objects.get(username="alice"))
path, key, body = sys.argv[1:]
answer = client.post(path, body, content_type="application/json", headers={"Idempotency-Key": key})
print("status", answer.status_code)
"""


def order(number: int) -> str:
    return f"order-{number}"


class Site:
    """The project: calls, requests, a bank with moods, and the words of ``explain``."""

    def __init__(self, project: Project, publisher: Celery) -> None:
        self.project = project
        self.publisher = publisher
        self.mood = Path(project.env["BANK_MOOD_FILE"])
        self.told: dict[int, str] = {}

    def pay(self, number: int, recipient: str, **options: str) -> None:
        about: dict[str, Any] = {
            "task_id": f"t-{number}",
            "idempotency_key": order(number),
            **options,
        }
        self.publisher.send_task(TASK, (self.project.alice, 100, "EUR", recipient), **about)

    def request(self, path: str, number: int) -> subprocess.Popen[str]:
        """Send a request in a process of its own."""
        body = json.dumps({"amount": 100, "currency": "EUR", "recipient": "acct_1"})
        command = [sys.executable, "-c", _REQUEST, path, order(number), body]
        env = child_environment(self.project.env)
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def answered(self, path: str, number: int) -> str:
        said, _ = self.request(path, number).communicate(timeout=60)
        return said.splitlines()[-1]

    def reaches(self, number: int, state: str) -> None:
        query = f"SELECT state FROM celery_idempotent_record WHERE key LIKE '%{order(number)}%'"
        wait_for(
            lambda: [tuple(row) for row in own.rows(self.project.alias, query)] == [(state,)],
            60,
            lambda: f"{order(number)} {state}: {own.rows(self.project.alias, query)}",
        )

    def run(self, *words: str) -> str:
        done = self.project.run("sql", *words)
        assert done.code == 0, done.text
        return done.text

    def explain(self, number: int, task: str, *words: str) -> None:
        self.told[number] = self.run("explain", order(number), "--task", task, *words)


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, databases: Iterator[str]
) -> Iterator[dict[int, str]]:
    """The words of ``explain``, by the history's number."""
    directory = tmp_path_factory.mktemp("histories")
    with open_project(directory, next(databases)) as project:
        publisher = Celery("publisher", broker=project.redis_url, set_as_current=False)
        celery_idempotent.install(publisher)
        site = Site(project, publisher)
        worker = Worker("testproject", directory=directory, name="payments", env=project.env)
        worker.start(timeout=60)
        try:
            _work(site, worker)
            _serve(site)
        finally:
            worker.kill()
            publisher.close()
        write(site.told)
        yield site.told


def _work(site: Site, worker: Worker) -> None:
    about: dict[str, Any] = {"task_id": "t-41", "idempotency_key": order(41)}
    site.publisher.send_task(DELIVERY, (str(uuid.uuid4()), "push"), **about)
    site.pay(42, "acct_closed", idempotency_scope="acme")
    site.reaches(41, "C")
    site.explain(41, DELIVERY)
    site.reaches(42, "F")
    site.explain(42, TASK, "--scope", "acme")
    site.mood.write_text("closed")
    site.pay(46, "acct_1")
    site.reaches(46, "P")
    worker.kill()
    words = ("--who", "alice", "--yes", "--force", "--reason", "paid by hand")
    site.run("fail", order(46), "--task", TASK, *words)
    site.explain(46, TASK)
    site.mood.unlink()


def _serve(site: Site) -> None:
    """Let requests come while no worker is there."""
    scope = ("--scope", f"user {site.project.alice}")
    assert site.answered("/payments/now/", 43) == "status 201"
    assert site.answered("/payments/now/", 43) == "status 201"
    site.explain(43, "http", *scope)
    assert site.answered("/payments/", 45) == "status 202"
    site.explain(45, TASK, *scope)
    site.mood.write_text("closed")
    first = site.request("/payments/now/", 44)
    try:
        site.reaches(44, "P")
        assert site.answered("/payments/now/", 44) == "status 409"
        site.explain(44, "http", *scope)
    finally:
        site.mood.unlink()
        first.communicate(timeout=60)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda each: str(each.number))
def test_explain_tells_the_facts_that_decide(told, history):
    check(history, told)
