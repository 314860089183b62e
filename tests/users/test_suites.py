"""The test suites of users pass as they are, and leave nothing behind: not in their database, and not in another."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sql import databases
from tests.support import programs
from tests.support.pages import files

pytest.importorskip("django")

from django.db import connections

SHOP = Path(__file__).parent / "shop"
#: Of those that are installed here; their import alone takes seconds.
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
DJANGO = ("-m", "django", "test", "tests.users.shop.suite_django", "--noinput")
PYTEST = (
    *("-m", "pytest", "-p", "pytest_django.plugin", "-p", "no:cacheprovider", "-q"),
    *("-c", "/dev/null"),
    *("--rootdir", str(SHOP), "--import-mode=importlib", str(SHOP / "suite_pytest.py")),
)


@pytest.fixture
def run(
    use_database: Callable[..., str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs a suite of the shop's, whose own database is not to be touched."""

    def run(vendor: str, *arguments: str, store: str = "django://") -> Any:
        alias = use_database(vendor)
        env = {
            "DJANGO_SETTINGS_MODULE": "tests.users.shop.settings",
            "SHOP_DATABASES": json.dumps({"default": connections.databases[alias]}),
            "SHOP_STORE": store,
            **NO_PLUGINS,
        }
        warn = ("-W", "error::ResourceWarning")
        done = programs.run(*warn, *arguments, cwd=tmp_path, env=env, timeout=200)
        for table in databases.TABLES:
            assert databases.rows(alias, f"SELECT * FROM celery_idempotent_{table}") == []
        return done

    return run


@pytest.mark.parametrize(
    ("vendor", "suite"),
    [
        pytest.param("postgresql", PYTEST, id="postgresql-pytest-django"),
        pytest.param("sqlite", DJANGO, id="sqlite-manage.py"),
        pytest.param("postgresql", DJANGO, id="postgresql-manage.py", marks=pytest.mark.wide),
        pytest.param("sqlite", PYTEST, id="sqlite-pytest-django", marks=pytest.mark.wide),
        pytest.param("mariadb", DJANGO, id="mariadb-manage.py", marks=pytest.mark.wide),
        pytest.param("mariadb", PYTEST, id="mariadb-pytest-django", marks=pytest.mark.wide),
    ],
)
def test_a_suite_passes_and_its_records_end_with_each_test(run, vendor, suite):
    done = run(vendor, *suite)
    # Nothing went wrong in a thread either. What was killed runs again.
    said = re.sub(r"idempotency: task .* again \(crash 1, ", "", done.stdout + done.stderr)
    assert not re.search("idempotency:|Traceback|Exception", said), said


@pytest.mark.parametrize(
    "command",
    [
        ("pytest", "-q", "-p", "no:cacheprovider", "test_pytest.py"),
        ("unittest",),
    ],
    ids=["pytest", "unittest"],
)
def test_the_suites_of_the_page_pass_without_the_server_of_their_records(tmp_path, command):
    """Each sends the same key twice in two tests."""
    for name, code in files("testing").items():
        (tmp_path / name).write_text(code)
    done = programs.python(tmp_path, "-m", *command)
    assert "2 passed" in done.stdout or "Ran 2 tests" in done.stderr
