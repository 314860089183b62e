"""One setting decides where the receiver's records are; in the database, entry and record are one transaction."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.preloaded import spawn
from tests.support.workers import child_environment

pytest.importorskip("django")


@pytest.mark.redis
@pytest.mark.parametrize(
    ("store", "name", "atomic"),
    [
        ("", "RedisStore", False),
        ("django://", "DjangoStore", True),
        pytest.param("hybrid+{redis}", "HybridStore", True, marks=pytest.mark.wide),
    ],
)
def test_what_fails_after_its_write_leaves_nothing_where_the_record_is_in_the_database(
    tmp_path: Path, databases: Iterator[str], store: str, name: str, atomic: bool
) -> None:
    redis_url = next(databases)
    here = child_environment()
    env = {key: value for key, value in here.items() if not key.startswith("DATABASE_")}
    env |= {"DATABASE_PATH": str(tmp_path / "db.sqlite3"), "REDIS_URL": redis_url}
    env["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    if store:
        env["IDEMPOTENCY_STORE"] = store.format(redis=redis_url)
    else:
        env.pop("IDEMPOTENCY_STORE", None)
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = (sys.executable, "-m", "tests.django.receiver")
        process = spawn(command, cwd=ROOT, env=env, log=file)
    assert process.wait(120) == 0, log.read_text()[-3000:]
    left = 0 if atomic else 1
    assert json.loads(log.read_text().splitlines()[-1]) == {
        "store": name,
        "atomic": atomic,
        "entered_of_three": 1,
        "left_by_the_failure": left,
        "entered_in_the_end": left + 1,
        "runs": 2,
        "record": "COMPLETED",
        # After the return: the entry is committed, and the record is not written yet.
        "killed_at_each_line": {"ok": [1]} if atomic else {"DOUBLED": [1], "LOST": [0]},
    }
