"""What is imported when: a child that is forked while a thread imports would wait for that import for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.workers import child_environment

PROGRAM = """
import sys
from celery_idempotent.stores import open_store
open_store("django://")  # Django may be configured later
from django.conf import settings
engine = "django.db.backends.{engine}"
settings.configure(DATABASES={{"default": {{"ENGINE": engine, "NAME": "not_to_be_opened"}}}})
if "{engine}" == "mysql":
    import pymysql
    pymysql.install_as_MySQLdb()
open_store("django://")
assert engine + ".base" in sys.modules
before = set(sys.modules)
from django.db import connections
wrapper = connections["default"]
assert wrapper.connection is None
assert set(sys.modules) == before
"""


@pytest.mark.parametrize(
    "engine",
    [
        "postgresql",
        pytest.param("mysql", marks=pytest.mark.wide),
        pytest.param("sqlite3", marks=pytest.mark.wide),
    ],
)
def test_a_store_imports_its_database_when_it_is_made_and_not_with_its_first_verb(engine: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(engine=engine)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
