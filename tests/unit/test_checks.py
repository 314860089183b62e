"""Each check finds what it is for, says what to set, and finds nothing where all is well."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import redelivery
from celery_idempotent.celery.reaper import SWEEP
from celery_idempotent.checks import Finding, check, check_settings, check_store, check_workers
from celery_idempotent.stores import base
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.facts import ServerFacts
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
    app = make_app(store, **settings)
    app.conf["broker_url"] = broker
    return app


def ids(found: list[Finding]) -> list[str]:
    for each in found:
        assert each.problem.endswith((".", "…")) or each.id in {"E001", "E006", "E013"}, each
        assert each.hint
        assert each.level == ("error" if each.id[0] == "E" else "warning")
    return [each.id for each in found]


def test_a_good_app_has_no_findings() -> None:
    assert ids(check_settings(app_with())) == []
    assert ids(check_store(app_with(Told(GOOD)))) == []


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
        assert found.id == "E021"
        assert "No module named 'nowhere_to_be_found'" in found.problem


def test_no_store_is_an_error() -> None:
    app = app_with(store="nonsense://")
    assert ids(check_settings(app)) == ["E001"]
    assert ids(check_store(app)) == []


def test_early_acknowledgement_is_found() -> None:
    app = app_with()
    app.task(name="early", base=IdempotentTask, acks_late=False, shared=False)(_nothing)
    (found,) = check_settings(app)
    assert ids([found]) == ["W002"]
    assert "early" in found.problem
    assert "shop.charge" not in found.problem


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


def test_a_missing_sweep_is_found_unless_the_schedule_has_one_of_its_own() -> None:
    assert ids(check_settings(app_with(idempotency_sweep_interval=None))) == ["W003"]
    own = {"sweep": {"task": SWEEP, "schedule": 60}}
    app = app_with(idempotency_sweep_interval=None, beat_schedule=own)
    assert ids(check_settings(app)) == []


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


@pytest.mark.parametrize(
    ("broker", "options", "found"),
    [
        ("redis://h", {}, []),
        ("redis://h", {"visibility_timeout": 60}, ["W004"]),
        ("redis://h", {"visibility_timeout": 61}, []),
        ("sqs://", {"visibility_timeout": 30}, ["W004"]),
        ("sentinel://h", {"visibility_timeout": 30}, ["W004"]),
        ("amqp://h", {"visibility_timeout": 30}, []),
        ("pgmq://u@h/d", {}, []),
        ("pgmq://u@h/d", {"visibility_timeout": "60"}, ["W004"]),
        ("gcpubsub://projects/p", {}, []),
        ("gcpubsub://projects/p", {"ack_deadline_seconds": 60}, ["W004"]),
        ("azureservicebus://p:k@ns", {}, ["W004"]),
        ("azureservicebus://p:k@ns", {"peek_lock_seconds": 300}, []),
        ("azureservicebus://p:k@ns", {"use_lock_renewal": True}, ["W004"]),
        ("azurestoragequeues://k@a", {"visibility_timeout": 30}, []),
    ],
)
def test_a_visibility_timeout_that_is_no_longer_than_a_lease_is_found(
    broker: str, options: dict[str, Any], found: list[str]
) -> None:
    app = app_with(broker=broker)
    app.conf.broker_transport_options = options
    assert ids(check_settings(app)) == found


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ({}, None),
        ({"default_retry_delay": 3599}, None),
        ({"default_retry_delay": 3600}, "3600 s"),
        ({"autoretry_for": (OSError,)}, None),
        ({"autoretry_for": (OSError,), "retry_kwargs": {"countdown": 7200}}, "7200 s"),
        ({"autoretry_for": (OSError,), "retry_backoff": 900, "retry_backoff_max": 9000}, "3600 s"),
        ({"autoretry_for": (OSError,), "retry_backoff": 899, "retry_backoff_max": 9000}, None),
        ({"autoretry_for": (OSError,), "retry_backoff": True, "max_retries": 99}, None),
        (
            {
                "autoretry_for": (OSError,),
                "retry_backoff": True,
                "retry_backoff_max": 9000,
                "max_retries": None,
            },
            "9000 s",
        ),
        ({"retry_backoff": 9000, "retry_backoff_max": 9000}, None),
    ],
)
def test_retries_that_wait_for_longer_than_the_broker_are_found(
    options: dict[str, Any], wait: str | None
) -> None:
    app = app_with()
    app.task(name="patient", base=IdempotentTask, shared=False, **options)(_nothing)
    found = check_settings(app)
    assert ids(found) == ([] if wait is None else ["W019"])
    if wait:
        assert f"patient (retries after up to {wait})" in found[0].problem
    app.conf["broker_url"] = "amqp://h"
    assert ids(check_settings(app)) == []


@pytest.mark.parametrize(
    ("broker", "options", "said"),
    [
        ("pgmq://u@h/d", {}, "1800 s (visibility_timeout)"),
        # A live worker extends the deadline of what it holds.
        ("gcpubsub://projects/p", {"ack_deadline_seconds": 61}, None),
        ("azureservicebus://p:k@ns", {"peek_lock_seconds": 300}, "300 s (peek_lock_seconds)"),
        (
            "azureservicebus://p:k@ns",
            {"peek_lock_seconds": 300, "use_lock_renewal": True, "max_lock_renewal_duration": 900},
            "900 s (peek_lock_seconds)",
        ),
        ("azureservicebus://p:k@ns", {"peek_lock_seconds": 61, "use_lock_renewal": True}, None),
    ],
)
def test_each_brokers_own_redelivery_timeout_counts(
    broker: str, options: dict[str, Any], said: str | None
) -> None:
    app = app_with(broker=broker)
    app.conf.broker_transport_options = options
    app.task(name="patient", base=IdempotentTask, shared=False, default_retry_delay=2000)(_nothing)
    found = check_settings(app)
    assert ids(found) == ([] if said is None else ["W019"])
    if said:
        assert f"waits for longer than {said}" in found[0].problem


@pytest.mark.parametrize("transport", ["pgmq", "gcpubsub", "azureservicebus", "SQS", "redis"])
def test_the_defaults_are_those_of_kombu(transport: str) -> None:
    """As its source says: the clients of most brokers are not here to be imported."""
    option, seconds = redelivery._TRANSPORTS[transport.lower()]
    folder = Path(kombu.__file__).parent / "transport"
    path = folder / f"{transport}.py"
    if not path.exists():
        path = folder / transport / "__init__.py"
    if not path.exists():
        pytest.skip(f"this kombu has no transport {transport}")
    number = re.findall(rf"{option}[\w: ]*= (\d+)\b", path.read_text())
    assert float(number[0]) == seconds


@pytest.mark.parametrize(
    ("settings", "queue"),
    [
        ({}, None),
        ({"task_queues": [Queue("celery")]}, None),
        ({"task_queues": [Queue("high"), Queue("low")]}, "celery"),
        ({"task_queues": [Queue("high")], "task_default_queue": "high"}, None),
        ({"task_queues": {"high": {}}, "task_routes": {"celery_idempotent.*": "high"}}, None),
        ({"task_queues": {"high": {}}, "task_routes": {SWEEP: {"queue": "none"}}}, "none"),
        # Where queues are made as they are named, nobody but the workers knows.
        ({"task_routes": {SWEEP: {"queue": "maintenance"}}}, None),
        # Nor where the broker routes.
        ({"task_queues": [Queue("a")], "task_routes": {SWEEP: {"exchange": "x"}}}, None),
        ({"task_queues": [Queue("a")], "idempotency_sweep_interval": None}, None),
    ],
)
def test_sweeps_for_a_queue_that_the_app_does_not_have_are_found(
    settings: dict[str, Any], queue: str | None
) -> None:
    app = app_with(**settings)
    found = [each for each in check_settings(app) if each.id != "W003"]
    assert ids(found) == ([] if queue is None else ["W022"])
    if queue:
        assert f"the queue {queue}:" in found[0].problem
        # To have looked for it does not make a worker consume it.
        assert queue not in app.amqp.queues
    assert ids(check_workers(app)) == []


def numbered(n: int) -> int:
    return n


@pytest.mark.parametrize(
    "route", [{"queue": "all"}, {"queue": "bcast"}, {"exchange": "all"}, {"exchange": "odd"}]
)
def test_tasks_that_are_routed_to_a_fanout_exchange_are_found(route: dict[str, str]) -> None:
    queues = [
        Queue("celery"),
        Broadcast("all", queue="bcast"),
        Queue("odd", Exchange("odd", "topic"), "#"),
    ]
    app = app_with(task_queues=queues, task_routes={"every*": route})
    for name, key in (("every", None), ("every.keyed", "n"), ("other", None)):
        task: Any = partial(app.task, base=IdempotentTask, shared=False)
        task(name=name, idempotency_key=key)(numbered)
    found = [each for each in check_settings(app) if each.id == "W023"]
    if route == {"exchange": "odd"}:
        assert not found
        return
    unkeyed, keyed = found
    assert unkeyed.problem.endswith("nothing is guarded: every.")
    assert keyed.problem.endswith("wait for its result: every.keyed.")
    assert not [each for each in check_settings(app_with()) if each.id == "W023"]


def test_a_broker_that_does_not_answer_is_no_finding_and_soon_given_up() -> None:
    began = time.monotonic()
    assert check_workers(app_with(broker="redis://127.0.0.1:1/0")) == []
    assert check_workers(app_with(broker="amqp://127.0.0.1:1//")) == []
    assert time.monotonic() - began < 10


def test_the_longest_retry_is_the_one_that_celery_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """900, 1800, 3600: with three retries the last is what the check says."""
    app = Celery("retries", set_as_current=False, broker="memory://", backend="cache+memory://")
    waits: list[float] = []

    @app.task(
        bind=True,
        autoretry_for=(OSError,),
        retry_backoff=900,
        retry_backoff_max=9000,
        retry_jitter=False,
    )
    def fail(self: Any) -> None:
        raise OSError

    def retry(countdown: float, **_: Any) -> Exception:
        waits.append(countdown)
        return ValueError()

    task: Any = app.tasks[fail.name]
    monkeypatch.setattr(task, "retry", retry)
    for retries in range(task.max_retries):
        with pytest.raises(ValueError):
            task.apply(retries=retries, throw=True)
    assert max(waits) == 3600


def test_beat_entries_that_wait_for_longer_than_the_broker_are_found() -> None:
    def entry(task: str, countdown: int) -> dict[str, Any]:
        return {"task": task, "schedule": 60, "options": {"countdown": countdown}}

    schedule = {
        "soon": entry("shop.charge", 3599),
        "late": entry("shop.charge", 7200),
        "else": entry("not.ours", 7200),
        "bare": {"task": "shop.charge", "schedule": timedelta(days=1)},
    }
    (found,) = check_settings(app_with(beat_schedule=schedule))
    assert ids([found]) == ["W019"]
    assert "the beat entry late (countdown 7200 s)." in found.problem


def test_the_broker_that_messages_are_read_from_counts() -> None:
    app = app_with(broker="amqp://h")
    app.conf.broker_transport_options = {"visibility_timeout": 30}
    app.conf["broker_read_url"] = ["redis://one", "redis://two"]
    assert ids(check_settings(app)) == ["W004"]


@pytest.mark.parametrize(
    ("settings", "found", "said"),
    [
        ({"task_serializer": "toml"}, ["E014"], "the serializer of shop.charge 'toml'"),
        ({"result_serializer": "toml"}, ["E014"], "result_serializer 'toml'"),
        ({"task_compression": "rar"}, ["E014"], "task_compression 'rar'"),
        ({"result_compression": "rar"}, ["E014"], "result_compression 'rar'"),
        ({"task_compression": "gzip", "result_compression": "bzip2"}, [], ""),
        ({"task_serializer": "yaml"}, ["W015"], "shop.charge (yaml)"),
        ({"task_serializer": "yaml", "accept_content": ["json", "yaml"]}, [], ""),
        ({"task_serializer": "yaml", "accept_content": ["json", "application/x-yaml"]}, [], ""),
        ({"result_serializer": "yaml"}, ["W016"], "written as yaml"),
        ({"result_serializer": "yaml", "task_ignore_result": True}, ["W016"], ""),
        ({"result_serializer": "yaml", "result_accept_content": ["yaml"]}, [], ""),
        ({"result_accept_content": ["yaml"]}, ["W016"], "written as json"),
        ({"accept_content": ["json", "pickle"]}, ["W017"], "Pickles"),
        ({"accept_content": ["json", "application/x-python-serialize"]}, ["W017"], "Pickles"),
        ({"result_accept_content": ["json", "pickle"]}, ["W017"], "Pickles"),
    ],
)
def test_formats_that_cannot_be_written_or_read_are_found(
    settings: dict[str, Any], found: list[str], said: str
) -> None:
    seen = check_settings(app_with(**settings))
    assert ids(seen) == found
    assert said in "".join(each.problem for each in seen)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"idempotency_serializer": "yaml"}, "'yaml' writes what this app does not accept"),
        ({"idempotency_serializer": "toml"}, "'toml' is not installed"),
        ({"idempotency_compression": "gzip"}, "was removed. Values are stored as their serializer"),
        ({"accept_content": ["json", "toml"]}, "accept_content names 'toml'"),
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
        assert ids([found]) == ["E013"]
        assert said in found.problem


def test_a_task_that_is_switched_off_is_not_looked_at() -> None:
    app = app_with()
    app.task(
        name="off",
        base=IdempotentTask,
        idempotency_mode="off",
        default_retry_delay=9000,
        shared=False,
    )(_nothing)
    assert ids(check_settings(app)) == []


@pytest.mark.parametrize(
    ("skews", "said"),
    [
        ([0, 0], None),
        ([5000, -5000], None),
        ([0, 5600, 1], "6 s ahead of this machine's"),
        ([-3_600_000, 9000], "3600 s behind this machine's"),
    ],
)
def test_a_clock_that_is_seconds_off_is_found(skews: list[int], said: str | None) -> None:
    told = Told(GOOD)
    told.skews_ms = lambda: skews  # type: ignore[method-assign]
    found = check_store(app_with(told))
    assert ids(found) == ([] if said is None else ["W018"])
    if said:
        assert said in found[0].problem


def test_what_fits_between_question_and_answer_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1_000, 9_000] * 4)
    clock = SimpleNamespace(time_ns=lambda: next(times) * 1_000_000)
    monkeypatch.setattr(base, "time", clock)
    for there, skew in ((1_000, 0), (9_000, 0), (9_001, 1), (400, -600)):
        assert base.skew_ms(partial(int, there)) == skew


@pytest.mark.redis
def test_the_clock_of_a_real_server_is_read(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_with(private_redis.url())
    assert "W018" not in ids(check_store(app))
    ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + 60 * 10**9)
    monkeypatch.setattr(base, "time", ahead)
    (found,) = (each for each in check_store(app) if each.id == "W018")
    assert "60 s behind this machine's" in found.problem


def test_the_memory_of_a_process_is_no_store_for_many() -> None:
    assert ids(check_settings(app_with("memory://"))) == ["W005"]


def test_a_store_that_does_not_answer_is_an_error() -> None:
    (found,) = check_store(app_with(REDIS))
    assert ids([found]) == ["E006"]
    assert "127.0.0.1:1" in found.problem


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"version": "6.0.16"}, ["E007"]),
        ({"version": "6.2.0"}, []),
        ({"version": "10.0.0"}, []),
        ({"kind": "Valkey", "version": "7.0.1"}, ["E007"]),
        ({"kind": "Valkey", "version": "8.1.0"}, []),
        ({"eviction": "allkeys-lru"}, ["W008"]),
        ({"eviction": "volatile-ttl"}, ["W008"]),
        ({"persistent": False}, ["W009"]),
        ({"persistent": None}, []),
    ],
)
def test_what_a_server_says_is_judged(change: dict[str, Any], found: list[str]) -> None:
    assert ids(check_store(app_with(Told(replace(GOOD, **change))))) == found


def test_a_finding_about_all_servers_of_a_cluster_comes_once() -> None:
    bad = replace(GOOD, eviction="allkeys-lru")
    assert ids(check_store(app_with(Told(bad, bad, GOOD)))) == ["W008"]


@pytest.fixture
def told_redis(private_redis: Any) -> Iterator[Any]:
    """A client of a Redis of our own, whose settings are put back."""
    import redis

    client = redis.Redis.from_url(private_redis.url())
    before = {
        name: client.config_get(name)[name] for name in ("maxmemory-policy", "save", "appendonly")
    }
    yield client
    for name, value in before.items():
        client.config_set(name, str(value))
    client.close()


@pytest.mark.redis
def test_a_real_server_is_asked(private_redis: Any, told_redis: Any) -> None:
    app = app_with(private_redis.url())
    told_redis.config_set("maxmemory-policy", "noeviction")
    told_redis.config_set("appendonly", "no")
    told_redis.config_set("save", "3600 1")
    assert ids(check_store(app)) == []
    told_redis.config_set("maxmemory-policy", "allkeys-lru")
    told_redis.config_set("save", "")
    assert ids(check_store(app)) == ["W008", "W009"]


@pytest.mark.redis
def test_a_server_that_does_not_let_us_ask_is_said_to_be_unknown(
    private_redis: Any, told_redis: Any
) -> None:
    told_redis.execute_command("ACL", "SETUSER", "shy", "on", "nopass", "~*", "+@all", "-info")
    try:
        host = private_redis.url().partition("://")[2]
        assert ids(check_store(app_with(f"redis://shy:x@{host}"))) == ["W011"]
        told_redis.execute_command("ACL", "SETUSER", "shy", "-time", "+info")
        assert "W018" not in ids(check_store(app_with(f"redis://shy:x@{host}")))
    finally:
        told_redis.execute_command("ACL", "DELUSER", "shy")


def _nothing() -> None:
    """What a task does here."""
