"""`make demo` is run as a whole: its exit code is its judgement of the idempotent ledger."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.programs import run

pytestmark = [pytest.mark.worker, pytest.mark.timeout(240)]


def perform(directory: Path, *arguments: str) -> dict[str, Any]:
    command = ("-m", "testproject.demo", "--json", "--seed", "7", *arguments)
    done = run(*command, cwd=ROOT, env={"TMPDIR": directory}, timeout=200)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["idempotent"]["rows"] == report["deliveries"]
    assert report["plain"]["rows"] > report["deliveries"]
    assert report["worker_kills"] + report["process_kills"] > 0
    return report


def test_the_worker_takes_its_time_and_holds_the_lock_around_the_gap(tmp_path: Path) -> None:
    """Django's signals refer weakly to what is connected, and ``connect`` as a decorator drops it."""
    code = (
        "import django; django.setup()\n"
        "from testproject.demo import rehearsal\n"
        "from testproject.webhooks.tasks import about_to_write, written\n"
        "assert about_to_write.has_listeners() and written.has_listeners()\n"
    )
    environment = {
        "DJANGO_SETTINGS_MODULE": "testproject.demo.settings",
        "DJANGO_DEBUG": "0",  # while it is on, Django remembers every receiver
        "DJANGO_SECRET_KEY": "secret",
        "DATABASE_PATH": str(tmp_path / "ledger.sqlite3"),
        "GITHUB_WEBHOOK_SECRET": "secret",
        "REDIS_URL": "redis://localhost:6379/0",
    }
    run("-c", code, cwd=ROOT, env=environment)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Eight of the forty events, which are performed in a quarter of the time."""
    path = tmp_path / "few.jsonl"
    with (ROOT / "testproject" / "sample_events.jsonl").open() as sample:
        path.write_text("".join(itertools.islice(sample, 8)))
    return path


@pytest.mark.wide
def test_the_demonstration_enters_every_delivery_once_and_the_plain_task_does_not(
    tmp_path: Path,
) -> None:
    report = perform(tmp_path)
    assert report["store"] == "redis"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


@pytest.mark.parametrize("store", ["django", "hybrid"])
@pytest.mark.wide
def test_with_the_records_in_the_database_it_kills_anywhere(
    tmp_path: Path, few: Path, store: str
) -> None:
    report = perform(tmp_path, "--store", store, "--events", str(few))
    assert report["store"] == store
    assert list(tmp_path.iterdir()) == [few], "it leaves nothing behind"
