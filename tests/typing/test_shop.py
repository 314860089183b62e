"""What a type checker lets pass works, too."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.typing import shop

MISTAKES = """
from celery import Celery
from celery_idempotent import IdempotentTask, checks, get_store, metrics, testing
from celery_idempotent.celery import finding
from celery_idempotent.http import enqueue

app = Celery("typed shop", task_cls=IdempotentTask)


@app.task(bind=True, shared=False)
def charge(self: IdempotentTask, order_id: str) -> str:
    self.idempotency.key.upper()
    self.idempotency.keys  # wrong: reportAttributeAccessIssue
    return order_id


charge.idempotency_record("k", scope="tenant")
charge.idempotency_record("k", scopes="tenant")  # wrong: reportCallIssue
charge.idempotency_forget("k", reason=3)  # wrong: reportArgumentType
number: int = charge.idempotency_record("k")  # wrong: reportAssignmentType
lease: int = charge.idempotency_policy.lease_ms
charge.idempotency_policy.lease  # wrong: reportAttributeAccessIssue
now: int = get_store(app).now_ms()
metrics.install()
checks.check(app)
with testing.isolated_records(app) as store:
    finding.find(store, "id", finding.select(app, store, {"task": "charge"}), [])
enqueue(charge, ("a",), key="k", scope="tenant").status.bit_length()
enqueue(charge, ("a",), key="k")  # wrong: reportCallIssue
enqueue(charge, ("a",), key=7, scope="tenant")  # wrong: reportArgumentType
get_store("redis://")  # wrong: reportArgumentType
"""


def test_a_program_that_mypy_accepts_runs() -> None:
    assert shop.calls() == ["k", "z", "tests.typing.shop.elsewhere"]
    body, status, headers = asyncio.run(shop.route("r"))
    assert (status, headers["X-Status"]) == (202, "202"), body


@pytest.mark.wide
def test_pyright_accepts_that_program_in_strict_mode_and_sees_the_mistakes_of_another(
    tmp_path: Path,
) -> None:
    """Most editors ask pyright, where ``make types`` asks mypy."""
    pytest.importorskip("pyright")
    text = (ROOT / "tests" / "typing" / "shop.py").read_text()
    (tmp_path / "shop.py").write_text(f"# pyright: strict\n{text}")
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        (Path(each["file"]).name, each["range"]["start"]["line"], each.get("rule"))
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    }
    assert found == {
        ("mistakes.py", number, rule)
        for number, line in enumerate(MISTAKES.splitlines())
        for rule in re.findall(r"# wrong: (\w+)", line)
    }, done.stdout
