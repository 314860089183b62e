"""One setting decides where the receiver's records are; in the database, entry and record are one transaction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("django")

_RUN = "import django; django.setup(); from tests.django import receiver; receiver.main()"


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
    env = {key: value for key, value in os.environ.items() if not key.startswith("DATABASE_")}
    env |= {"DATABASE_PATH": str(tmp_path / "db.sqlite3"), "REDIS_URL": redis_url}
    env["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    if store:
        env["IDEMPOTENCY_STORE"] = store.format(redis=redis_url)
    else:
        env.pop("IDEMPOTENCY_STORE", None)
    done = subprocess.run(
        (sys.executable, "-c", _RUN),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    left = 0 if atomic else 1
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "store": name,
        "atomic": atomic,
        "entered_of_three": 1,
        "left_by_the_failure": left,
        "entered_in_the_end": left + 1,
        "counted": left + 2,
        "runs": 2,
        "record": "COMPLETED",
    }
