"""Each check finds what it is for, says what to set, and finds nothing where all is well."""

from __future__ import annotations

import re
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import republish
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.checks import Finding, check, check_settings, check_store
from celery_idempotent.stores.base import ServerFacts
from celery_idempotent.stores.memory import MemoryStore
from tests.support.admin import make_app

GOOD = ServerFacts(kind="Redis", version="7.2.1", eviction="noeviction", persistent=True)
REDIS = "redis://127.0.0.1:1/0"


class Told(MemoryStore):
    """A store that answers, and whose server says this about itself."""

    def __init__(self, *servers: ServerFacts) -> None:
        super().__init__()
        self.servers = servers

    def facts(self) -> Any:
        return self.servers


def app_with(store: Any = REDIS, broker: str = "redis://127.0.0.1:1/0", **settings: Any) -> Celery:
    waits = settings.pop("broker_transport_options", None)
    app = make_app(store, **settings)
    app.conf["broker_url"] = broker
    if waits is not None:
        app.conf.broker_transport_options = waits
    return app


def ids(found: list[Finding]) -> list[str]:
    for each in found:
        assert each.problem.endswith((".", "…")) or each.id in {"E001", "E006"}, each
        assert each.hint
        assert each.level == ("error" if each.id[0] == "E" else "warning")
    return [each.id for each in found]


OFF: dict[str, Any] = {"idempotency_sweep_interval": None}


def waits(broker: str, **options: Any) -> dict[str, Any]:
    return {"broker": broker, "broker_transport_options": options}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"store": "memory://"}, ["W005"]),
        (OFF, ["W003"]),
        ({**OFF, "beat_schedule": {"sweep": {"task": SWEEP, "schedule": 60}}}, []),
        (waits("redis://h", visibility_timeout=60), ["W004"]),
        (waits("redis://h", visibility_timeout=61), []),
        (waits("sqs://", visibility_timeout=30), ["W004"]),
        (waits("amqp://h", visibility_timeout=30), []),
        ({**waits("amqp://h", visibility_timeout=30), "broker_read_url": ["redis://h"]}, ["W004"]),
        (waits("pgmq://u@h/d"), []),
        (waits("pgmq://u@h/d", visibility_timeout="60"), ["W004"]),
        (waits("gcpubsub://projects/p", ack_deadline_seconds=60), ["W004"]),
        (waits("azureservicebus://p:k@ns"), ["W004"]),
        (waits("azurestoragequeues://k@a", visibility_timeout=30), []),
    ],
)
def test_settings_that_lose_keys_or_messages_are_found(
    settings: dict[str, Any], found: list[str]
) -> None:
    assert ids(check_settings(app_with(**settings))) == found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"version": "6.0.16"}, ["E007"]),
        ({"version": "6.2.0"}, []),
        ({"kind": "Valkey", "version": "7.0.1"}, ["E007"]),
        ({"eviction": "allkeys-lru"}, ["W008"]),
        ({"persistent": False}, ["W009"]),
        ({"persistent": None}, []),
    ],
)
def test_what_a_server_says_is_judged_once(change: dict[str, Any], found: list[str]) -> None:
    server = replace(GOOD, **change)
    assert ids(check_store(app_with(Told(server, server, GOOD)))) == found


def test_an_app_without_idempotent_tasks_is_not_looked_at() -> None:
    app = Celery("plain", set_as_current=False, broker="amqp://")
    for name in list(app.tasks):
        if not name.startswith("celery."):
            app.tasks.unregister(name)
    assert check(app) == []


@pytest.mark.parametrize("look", [check_settings, check])
def test_the_apps_tasks_are_imported_before_it_is_looked_at(tmp_path, monkeypatch, look) -> None:
    name = "tasks_" + uuid.uuid4().hex
    (tmp_path / f"{name}.py").write_text(
        "from celery import shared_task\nfrom celery_idempotent import IdempotentTask\n"
        "@shared_task(base=IdempotentTask)\ndef charge(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    app = Celery("lazy", set_as_current=False, broker="amqp://", include=[name])
    app.conf.idempotency_store = "nonsense://x"
    assert ids(look(app)) == ["E001"]


def test_tasks_that_cannot_be_imported_are_an_error(tmp_path, monkeypatch) -> None:
    name = "tasks_" + uuid.uuid4().hex
    (tmp_path / f"{name}.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    app = Celery("broken", set_as_current=False, broker="amqp://", include=[name])
    app.conf.idempotency_store = "memory://"
    for _ in range(2):  # nor is it forgotten after the first look
        (found,) = check(app)
        assert found.id == "E001"
        assert "No module named 'nowhere_to_be_found'" in found.problem


def test_the_text_of_an_error_that_may_contain_a_secret_is_not_shown(monkeypatch) -> None:
    app = app_with()
    monkeypatch.setattr(app.loader, "import_default_modules", lambda: int("password"))
    (found,) = check(app)
    assert found.problem == "No worker starts: ValueError."


def test_early_acknowledgement_of_what_is_only_observed_is_as_it_was() -> None:
    app = app_with(idempotency_mode="observe", task_acks_late=False)
    assert ids(check_settings(app)) == []
    app = app_with(idempotency_mode="observe", task_acks_late=False)
    app.task(name="enforced", base=IdempotentTask, idempotency_mode="enforce", shared=False)(
        _nothing
    )
    (found,) = check_settings(app)
    assert ids([found]) == ["W002"]
    assert "enforced" in found.problem
    assert "shop.charge" not in found.problem


@pytest.mark.parametrize("alone", [True, False])
def test_options_of_a_task_with_another_base_are_found(alone: bool) -> None:
    app = Celery("plain", set_as_current=False, broker="amqp://") if alone else app_with()
    define: Any = app.task
    define(name="plain", shared=False)(_nothing)
    assert "W027" not in ids(check_settings(app))
    define(name="unguarded", idempotency_lease=5, shared=False)(_nothing)
    (found,) = check_settings(app)
    assert ids([found]) == ["W027"]
    assert found.problem.endswith(": unguarded.")


def _order(tenant: str, order: int) -> None:
    pass


def test_tasks_whose_keys_tenants_would_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with()
    rules: list[tuple[str, dict[str, Any]]] = [
        ("shared", {"idempotency_key": "order"}),
        ("scoped", {"idempotency_key": "order", "idempotency_scope": "tenant"}),
        ("by_task_id", {}),
    ]
    for name, options in rules:
        task = app.task(name=name, base=IdempotentTask, shared=False, **options)
        task(_order)
    assert "W024" not in ids(check_settings(app))
    monkeypatch.setitem(sys.modules, "django_tenants", ModuleType("django_tenants"))
    (found,) = (each for each in check_settings(app) if each.id == "W024")
    assert "shared" in found.problem
    assert "scoped" not in found.problem
    assert "by_task_id" not in found.problem


@pytest.mark.parametrize("transport", ["pgmq", "gcpubsub", "azureservicebus", "SQS", "redis"])
def test_the_defaults_are_those_of_kombu(transport: str) -> None:
    """As its source says: the clients of most brokers are not here to be imported."""
    option, seconds = republish._TRANSPORTS[transport.lower()]
    folder = Path(kombu.__file__).parent / "transport"
    path = folder / f"{transport}.py"
    if not path.exists():
        path = folder / transport / "__init__.py"
    if not path.exists():
        pytest.skip(f"this kombu has no transport {transport}")
    number = re.findall(rf"{option}[\w: ]*= (\d+)\b", path.read_text())
    assert float(number[0]) == seconds


@pytest.mark.filterwarnings("ignore:\\s*The 'queue' task attribute is deprecated")
@pytest.mark.parametrize("route", [{"queue": "all"}, {"queue": "bcast"}, {"exchange": "all"}, {}])
def test_tasks_that_are_routed_to_a_fanout_exchange_are_found(route: dict[str, str]) -> None:
    odd = Queue("odd", Exchange("odd", "topic"), "#")
    queues = [Queue("celery"), Broadcast("all", queue="bcast"), odd]
    routes = {"every": route, "own": {"queue": "celery"}, "other": {"exchange": "odd"}}
    app = app_with(task_queues=queues, task_routes=routes)
    for name in routes:
        options: dict[str, Any] = {"queue": "bcast"} if name == "own" else {}
        app.task(name=name, base=IdempotentTask, shared=False, **options)(_nothing)
    (finding,) = check_settings(app)
    assert ids([finding]) == ["W023"]
    assert finding.problem.endswith(": every, own." if route else ": own.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"idempotency_serializer": "yaml"}, "'yaml', which this app does not accept"),
        ({"idempotency_serializer": "toml"}, "'toml', which is not installed"),
        ({"idempotency_leese": 3}, "did you mean idempotency_lease?"),
        ({"idempotency_sweep_interval": 0}, "at least 0.1 seconds"),
    ],
)
def test_an_option_that_is_bad_is_found_and_found_again(
    settings: dict[str, Any], said: str
) -> None:
    app = Celery("bad", set_as_current=False, broker="redis://h")
    app.conf.update(idempotency_store=REDIS, **settings)
    app.task(name="charge", base=IdempotentTask, shared=False)(_nothing)
    for _ in range(2):
        (found,) = check(app)
        assert ids([found]) == ["E001"]
        assert said in found.problem


def _nothing() -> None:
    """What a task does here."""
