"""docs/reference.md has each option in full, and each has a test of what it does on a real worker."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import ALL_ARGUMENTS, IdempotentTask
from celery_idempotent.protocol.options import KEY_OPTIONS, SETTINGS, Policy
from celery_idempotent.stores import get_store
from tests.support.paths import ROOT

OPTIONS = sorted(
    {name.removesuffix("_ms") for name in Policy.__dataclass_fields__}
    | set(KEY_OPTIONS)
    | set(SETTINGS)
)

#: The checklist: where each option is shown to do on a real worker what the reference says.
SHOWN_BY = {
    "atomic": "tests/policies/test_effects.py::TestAtomic",
    "fingerprint": "tests/policies/test_effects.py::TestFingerprint",
    "key": "tests/worker/test_delivery.py::test_delivered_again_after_its_end_is_answered_without_a_run",
    "lease": "tests/migrations/test_migrations.py::"
    "test_a_duplicate_does_not_run_while_the_first_is_at_work_for_longer_than_its_lease",
    "max_crashes": "tests/faults/test_lost_workers.py::test_a_task_that_kills_its_process_each_time_is_failed",
    "max_result_bytes": "tests/faults/test_pools_and_results.py::"
    "test_a_result_that_is_too_large_is_taken_from_the_result_backend",
    "mode": "tests/policies/test_modes.py::TestObserve",
    "namespace": "tests/policies/test_effects.py::TestNamespace",
    "on_conflict": "tests/matrix/scenarios.py::while_running",
    "on_stale": "tests/policies/test_stale.py",
    "on_store_error": "tests/policies/test_modes.py::TestOpen",
    "permanent_errors": "tests/matrix/scenarios.py::after_permanent_failure",
    "publish_once": "tests/policies/test_publish_once.py",
    "retention": "tests/policies/test_effects.py::TestRetention",
    "scope": "tests/policies/test_effects.py::TestScope",
    "serializer": "tests/faults/test_pools_and_results.py::"
    "test_a_stored_pickle_is_not_read_by_an_app_that_accepts_json_only",
    "store": "tests/policies/test_modes.py::test_it_is_protected_again_once_the_store_is_back",
    "store_result": "tests/policies/test_effects.py::TestStoreResult",
    "sweep_interval": "tests/worker/test_crashes.py::"
    "test_registers_itself_with_beat_and_interrupts_what_nobody_will_redeliver",
    "wait": "tests/policies/test_options.py::test_the_time_to_wait_takes_effect",
}

SECTION = (ROOT / "docs" / "reference.md").read_text().partition("## Each option\n")[2]
SECTION = SECTION.partition("\n## ")[0]


def paragraph(option: str) -> str:
    return SECTION.partition(f"### `idempotency_{option}`\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_paragraph_says_where_the_option_goes_and_what_it_is_without(option: str):
    first = paragraph(option).strip().partition("*")[2].partition(".*")[0]
    kind = "Setting" if option in SETTINGS else "Attribute"
    assert first.startswith(f"{kind}, `CELERY_IDEMPOTENCY_{option.upper()}`")
    assert "Default" in first
    if "second" in first or option in {"lease", "wait"}:
        assert re.search(r"Seconds or `timedelta`", first)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_shown_on_a_real_worker(option: str):
    path, _, name = SHOWN_BY[option].partition("::")
    test = (ROOT / path).read_text()
    assert not name or re.search(rf"^ *(class|def) {name}\b", test, re.MULTILINE)
    assert any(each in test for each in ("worker", "site", "shop", "on_redis", "shared.idle"))


def test_the_checklist_has_no_option_that_is_gone():
    assert sorted(SHOWN_BY) == OPTIONS


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
