"""docs/deploying.md: the test that pins keys passes, and fails for a deploy that changes one."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import pytest
from celery.signals import before_task_publish

from tests.support.apps import close_app
from tests.support.pages import block

SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop", set_as_current=False)

@app.task(base=IdempotentTask, shared=False, name="shop.charge", {options})
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
def test_the_test_for_ci_passes_and_finds_a_change(monkeypatch, options, passes):
    shop: Any = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setattr(before_task_publish, "receivers", [])
    exec(SHOP.format(options=options), vars(shop))
    page: dict[str, Any] = {}
    exec(block("deploying", "test_keys.py"), page)
    refused = pytest.raises(AssertionError, match=r"operations of shop.charge would run again")
    with contextlib.nullcontext() if passes else refused:
        page["test_no_key_changes"]()
    close_app(shop.app)
