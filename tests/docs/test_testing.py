"""docs/testing.md: its example suites pass, and the report that it shows is the one that comes."""

from __future__ import annotations

import re

from tests.support.pages import files
from tests.support.paths import ROOT
from tests.support.programs import python

PAGE = (ROOT / "docs" / "testing.md").read_text()
SHOW = """
from bank import careless, transfers
from celery_idempotent.testing import crash_matrix

try:
    crash_matrix(careless, arguments=lambda name: [name], effects=transfers)
except AssertionError as report:
    print(report)
"""


def test_the_examples_of_the_page_pass(tmp_path):
    for name, code in files("testing").items():
        (tmp_path / name).write_text(code)
    (tmp_path / "show.py").write_text(SHOW)
    options = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:valkey", "-p", "no:django")
    suites = ("test_deliveries.py", "test_crashes.py", "show.py")
    told = python(tmp_path, "-m", "pytest", *options, *suites).stdout
    assert "3 passed" in told
    (shown,) = re.findall(r"test_testing\.py -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert told.startswith(shown)
