"""The tutorials: their files are written, their commands are run, and what they print is what the page prints."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.stores import open_store
from tests.support.pages import load
from tests.support.paths import ROOT
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

REDIS = "redis://localhost:6379/0"


def written(page: str, directory: Path, **changes: str) -> list[str]:
    """Write the files of a page, each named by its first line; return their paths."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    paths = []
    for path, body in re.findall(
        r"^```python\n# (\S+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    ):
        for old, new in changes.items():
            body = body.replace(old, new)
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(body)
        paths.append(path)
    return paths


def answers(page: str, command: str) -> str:
    """Return what a page prints below a command."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.search(rf"^\$ {re.escape(command)}\n((?:[^$`].*\n)*)", text, re.MULTILINE)
    assert found, command
    return found[1]


def run(command: list[str], directory: Path, **env: str) -> str:
    environment = child_environment(env)
    environment["PYTHONPATH"] += f":{directory}"
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.redis
@pytest.mark.worker
def test_the_quickstart_works_as_it_is_told(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], tmp_path: Path
) -> None:
    assert written("quickstart", tmp_path, **{REDIS: private_redis.url()}) == [
        "shop.py",
        "customer.py",
    ]
    start_worker("shop", concurrency=2)

    told = run([sys.executable, "customer.py"], tmp_path)
    assert told == answers("quickstart", "python customer.py")
    assert (tmp_path / "charges.txt").read_text() == answers("quickstart", "cat charges.txt")

    ask = [sys.executable, "-m", "celery", "-A", "shop", "idempotency"]
    assert "COMPLETED" in run([*ask, "show", "order-17", "--task", "shop.charge"], tmp_path)


#: The commands of the page, in as few processes as can be.
START = """
from django.core.management import call_command
call_command("startproject", "shop", ".")
call_command("startapp", "orders")
"""
MIGRATE = """
import shop
import django
django.setup()
from django.core.management import call_command
call_command("makemigrations", "orders", verbosity=0)
call_command("migrate", verbosity=0)
call_command("check", tags=["idempotency"])
"""

#: The requests of the page's curl, without a server: what is tested is not Django's.
REQUESTS = """
import shop
import django
django.setup()
from django.test import Client
ann = {"Authorization": "Bearer secret-of-ann", "Idempotency-Key": '"click-1"'}
client = Client(headers=ann, SERVER_NAME="localhost")
for cents in (1999, 1999, 5):
    answer = client.post("/orders/", {"cents": cents})
    print(answer.status_code, answer.get("Idempotent-Replayed"), answer.json().get("order"))
nobody = Client(headers={"Idempotency-Key": "x"}, SERVER_NAME="localhost")
print(nobody.post("/orders/", {"cents": 1}).status_code)
"""


@pytest.mark.redis
@pytest.mark.worker
def test_the_django_page_works_as_it_is_told(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], tmp_path: Path
) -> None:
    run([sys.executable, "-c", START], tmp_path)
    made = (tmp_path / "shop/settings.py").read_text()
    paths = written("django", tmp_path, **{REDIS: private_redis.url()})
    assert {"shop/settings.py", "shop/celery.py", "orders/tasks.py", "orders/views.py"} < {*paths}
    more = (tmp_path / "shop/settings.py").read_text()
    (tmp_path / "shop/settings.py").write_text(made + more)
    run([sys.executable, "-c", MIGRATE], tmp_path)
    start_worker("shop")

    # The requests of the page's curl, without a server: what is tested is not Django's.
    (tmp_path / "try.py").write_text(REQUESTS)
    told = run([sys.executable, "try.py"], tmp_path).splitlines()
    assert told == ["201 None 1", "201 true 1", "422 None None", "403"]

    count = "from orders.models import Entry, Order; print(Order.objects.count(), Entry.objects.count())"
    printed = answers("django", f'python manage.py shell -c "{count}"')
    wait_for(lambda: counted(tmp_path) == printed, 60, lambda: f"orders and entries: {printed}")


def counted(directory: Path) -> str:
    with sqlite3.connect(directory / "db.sqlite3", timeout=20) as db:
        tables = ("orders_order", "orders_entry")
        found = [db.execute(f"SELECT count(*) FROM {each}").fetchone()[0] for each in tables]
    return f"{found[0]} {found[1]}\n"


#: What a client does, with either framework.
CLIENT = """
import time
{client}
ann = {{"Authorization": "Bearer secret-of-ann", "Idempotency-Key": "{framework}"}}
order = {{"order_id": "{framework}-17", "cents": 1999}}
first = client.post("/charges", json=order, headers=ann)
again = client.post("/charges", json=order, headers=ann)
other = client.post("/charges", json=order | {{"cents": 5}}, headers=ann)
wrong = client.post("/charges", json=order, headers=ann | {{"Idempotency-Key": "x" * 300}})
nobody = client.post("/charges", json=order, headers={{"Idempotency-Key": "{framework}"}})
print(*(each.status_code for each in (first, again, other, wrong, nobody)))
for _ in range(300):
    found = client.get("/charges/{framework}", headers=ann)
    body = found.json() if callable(found.json) else found.json
    if body["state"] == "COMPLETED":
        break
    time.sleep(0.05)
print(body["state"], body["result"], client.get("/charges/other", headers=ann).status_code)
"""
CLIENTS = {
    "fastapi": "from fastapi.testclient import TestClient\nfrom fastapi_api import api\nclient = TestClient(api)",
    "flask": "from flask_api import api\nclient = api.test_client()",
}


@pytest.mark.redis
@pytest.mark.worker
def test_the_endpoints_of_other_frameworks_work_as_they_are_told(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], tmp_path: Path
) -> None:
    written("fastapi-flask", tmp_path, **{REDIS: private_redis.url()})
    start_worker("shop")
    for framework, client in CLIENTS.items():
        if not os.environ.get("CI"):
            pytest.importorskip(framework)
        program = CLIENT.format(client=client, framework=framework)
        assert run([sys.executable, "-c", program], tmp_path).splitlines() == [
            "202 202 422 400 401",
            f"COMPLETED {{'receipt': '{framework}-17'}} 404",
        ]
    charged = (tmp_path / "charges.txt").read_text().splitlines()
    assert charged == [f"{framework}-17 1999" for framework in CLIENTS]


@pytest.mark.parametrize("title", ["rabbitmq", "sqs", "sentinel", "cluster", "tls"])
def test_the_settings_of_the_brokers_page_are_taken(title: str) -> None:
    app = Celery(set_as_current=False)
    load(app, "brokers", title, {})
    open_store(app.conf.idempotency_store).close()
    app.close()
