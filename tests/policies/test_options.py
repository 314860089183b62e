"""Each option of a policy as an attribute, as a setting of the app, and through a namespace as in Django."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import InvalidOption
from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE
from tests.support.waiting import wait_for

#: Option, a value, its field of the policy and what it is there, a value that is refused.
OPTIONS: list[tuple[str, Any, str, Any, Any]] = [
    ("on_conflict", "ignore", "on_conflict", "ignore", "drop"),
    ("wait", 2, "wait_ms", 2000, "2"),
    ("wait", timedelta(milliseconds=1500), "wait_ms", 1500, -1),
    ("publish_once", True, "publish_once", True, "yes"),
    ("on_stale", "requeue", "on_stale", "requeue", "retry"),
    ("on_stale", "fail", "on_stale", "fail", None),
    ("on_store_error", "open", "on_store_error", "open", "fail"),
    ("mode", "observe", "mode", "observe", "watch"),
    ("lease", 0.5, "lease_ms", 500, 0.05),
    ("retention", timedelta(days=2), "retention_ms", 172_800_000, -1),
    ("permanent_errors", (KeyError,), "permanent_errors", (KeyError,), ("KeyError",)),
    ("max_crashes", 1, "max_crashes", 1, -1),
    ("store_result", False, "store_result", False, 0),
    ("max_result_bytes", 10, "max_result_bytes", 10, 1.5),
    ("serializer", "json", "serializer", "json", 5),
    ("atomic", True, "atomic", True, "yes"),
]
EVERY_OPTION = pytest.mark.parametrize(
    ("option", "value", "field", "kept", "bad"), OPTIONS, ids=lambda each: str(each)
)


def make(*, namespace: str = "", attributes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return a task of an app with these settings."""
    app = Celery("options", broker="memory://", backend="cache+memory://", set_as_current=False)
    settings = {"idempotency_store": "memory://", **settings}
    if namespace:
        named = {f"{namespace}_{name}".upper(): value for name, value in settings.items()}
        app.config_from_object(SimpleNamespace(**named), namespace=namespace)
    else:
        app.conf.update(settings)

    @app.task(name="work", base=IdempotentTask, shared=False, **(attributes or {}))
    def work(key: str) -> None: ...

    return app.tasks["work"]


@EVERY_OPTION
class TestEveryWay:
    def test_as_an_attribute(self, option, value, field, kept, bad):
        task = make(attributes={f"idempotency_{option}": value})
        assert getattr(task.idempotency_policy, field) == kept

    def test_as_a_setting(self, option, value, field, kept, bad):
        task = make(**{f"idempotency_{option}": value})
        assert getattr(task.idempotency_policy, field) == kept

    def test_through_a_namespace(self, option, value, field, kept, bad):
        task = make(namespace="CELERY", **{f"idempotency_{option}": value})
        assert getattr(task.idempotency_policy, field) == kept

    def test_an_attribute_wins(self, option, value, field, kept, bad):
        default = make().idempotency_policy
        others = {"mode": "enforce", "on_stale": "interrupt"}
        other = others.get(option, getattr(default, field))
        if isinstance(other, int) and field.endswith("_ms"):
            other = timedelta(milliseconds=other)
        task = make(attributes={f"idempotency_{option}": other}, **{f"idempotency_{option}": value})
        assert getattr(task.idempotency_policy, field) == getattr(default, field)

    def test_a_bad_value_is_refused_when_the_task_is_defined(self, option, value, field, kept, bad):
        with pytest.raises(InvalidOption, match=f"idempotency_{option}"):
            make(attributes={f"idempotency_{option}": bad})
        with pytest.raises(InvalidOption, match=f"idempotency_{option}"):
            make(namespace="CELERY", **{f"idempotency_{option}": bad})


PLAIN_TOO = pytest.mark.parametrize(
    "prefix", [pytest.param("", id="settings", marks=pytest.mark.wide), "CELERY"]
)
NAMESPACE_TOO = pytest.mark.parametrize(
    "prefix", ["", pytest.param("CELERY", marks=pytest.mark.wide)]
)


class TestOnAWorker:
    @PLAIN_TOO
    def test_settings_take_effect(self, open_site, key, gate, prefix):
        """One worker whose every task has these policies; the publisher of this process has them, too."""
        site = open_site(
            "redis",
            idempotency_on_conflict="ignore",
            idempotency_publish_once=True,
            idempotency_on_stale="requeue",
            idempotency_lease={"seconds": 20},
        )
        site.worker(concurrency=2, wanted={"prefix": prefix})
        first = site.publish("work", key, gate.path)
        site.noted("start", key)
        assert site.publish("work", key, gate.path).id == first.id
        record = site.record("work", key)
        assert record is not None
        assert (record.on_stale, record.message is not None) == ("requeue", True)
        assert record.deadline_ms is not None
        assert 19_000 < record.deadline_ms - record.updated_ms <= 27_000

        second = site.app.send_task("work", args=(key, gate.path))
        wait_for(lambda: second.state == "IGNORED", PATIENCE, "the duplicate to be ignored")
        gate.open()
        first.get(timeout=PATIENCE)
        record = site.record("work", key)
        assert record is not None
        assert record.state is State.COMPLETED
        assert site.ledger.count("start", key) == 1

    @NAMESPACE_TOO
    def test_the_time_to_wait_takes_effect(self, open_site, key, gate, prefix):
        site = open_site(
            "redis", idempotency_on_conflict="wait", idempotency_wait={"milliseconds": 700}
        )
        site.worker(concurrency=2, wanted={"prefix": prefix})
        first = site.publish("work", key, gate.path)
        site.noted("start", key)
        second = site.publish("work", key, gate.path)
        site.noted("postrun", task_id=second.id)
        began, ended = (
            site.ledger.entries(phase, task_id=second.id)[0].time for phase in ("prerun", "postrun")
        )
        assert 0.7 <= ended - began < 5
        gate.open()
        assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
