"""docs/options.md has each option in full."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import ALL_ARGUMENTS, IdempotentTask
from celery_idempotent.protocol.options import KEY_OPTIONS, SETTINGS, Policy, fields_by_option
from celery_idempotent.stores import get_store
from tests.support.paths import ROOT

OPTIONS = sorted({*fields_by_option(Policy), *KEY_OPTIONS, *SETTINGS})

SECTION = (ROOT / "docs" / "options.md").read_text().partition("\n## Keys\n")[0]


def paragraph(option: str) -> str:
    return SECTION.partition(f"### `idempotency_{option}`\n")[2].partition("\n##")[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_paragraph_says_where_the_option_goes_and_what_it_is_without(option: str):
    first = paragraph(option).strip().partition("*")[2].partition(".*")[0]
    kind = "Setting" if option in SETTINGS else "Attribute"
    assert first.startswith(f"{kind}, `CELERY_IDEMPOTENCY_{option.upper()}`")
    assert "Default" in first
    if "second" in first or option in {"lease", "wait"}:
        assert re.search(r"Seconds or `timedelta`", first)


EXAMPLES = re.findall(r"`idempotency_(\w+)=([^`]+)`", SECTION)


@pytest.mark.parametrize(("option", "value"), EXAMPLES, ids=[" = ".join(e) for e in EXAMPLES])
def test_every_value_of_the_page_is_taken(option: str, value: str):
    given = eval(value, {"ALL_ARGUMENTS": ALL_ARGUMENTS, "timedelta": timedelta})
    app = Celery("options", broker="memory://", backend="redis://", set_as_current=False)
    app.conf.update(idempotency_store="redis://127.0.0.1:1/0")
    attributes: dict[str, Any] = {}
    if option in SETTINGS:
        app.conf.update({f"idempotency_{option}": given})
    else:
        attributes[f"idempotency_{option}"] = given

    @app.task(name="charge", base=IdempotentTask, shared=False, **attributes)
    def charge(order_id: str, kind: str, event: Any, tenant: str, amount: int) -> None: ...

    task: Any = app.tasks["charge"]
    assert task.idempotency_policy
    get_store(app).close()
    app.close()
