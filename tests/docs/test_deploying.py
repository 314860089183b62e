"""docs/deploying.md: the test that pins keys passes, and fails for a deploy that changes one."""

from __future__ import annotations

import pytest

from tests.support.pages import block
from tests.support.programs import python

SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop")

@app.task(base=IdempotentTask, name="shop.charge", {options})
def charge(order_id, amount, note=None): ...
"""


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ('idempotency_key="order_id"', True),
        ('idempotency_key=("order_id", "amount")', False),
        ('idempotency_key="order_id", idempotency_namespace="pay"', False),
        ('idempotency_key="order_id", idempotency_scope="amount"', False),
        ('idempotency_key="order_id", idempotency_fingerprint="order_id"', False),
    ],
)
def test_the_test_for_ci_passes_and_finds_a_change(tmp_path, options, passes):
    (tmp_path / "shop.py").write_text(SHOP.format(options=options))
    (tmp_path / "test_keys.py").write_text(block("deploying", "test_keys.py"))
    plugins = ("-p", "no:cacheprovider", "-p", "no:valkey", "-p", "no:django")
    done = python(tmp_path, "-m", "pytest", "-q", *plugins, "test_keys.py", succeeds=passes)
    if not passes:
        assert "operations of shop.charge would run again after this deploy" in done.stdout
