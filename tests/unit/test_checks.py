"""Each check finds what it is for, says what to set, and finds nothing where all is well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.checks import Finding, check, check_settings, check_store
from celery_idempotent.reaper import SWEEP
from celery_idempotent.stores.redis_facts import ServerFacts
from tests.support.admin import make_app

GOOD = ServerFacts(
    kind="Redis", version="7.2.1", eviction="noeviction", persistent=True, replicas=0
)
REDIS = "redis://127.0.0.1:1/0"


class Told:
    """A store that answers, and whose server says this about itself."""

    def __init__(self, *servers: ServerFacts, replicas: int = 0) -> None:
        self.servers = servers
        self.replicas = replicas

    def facts(self) -> Any:
        return self.servers

    def stats(self) -> None:
        """Answer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def app_with(store: Any = REDIS, broker: str = "redis://127.0.0.1:1/0", **settings: Any) -> Celery:
    app = make_app(store, **settings)
    app.conf["broker_url"] = broker
    return app


def ids(found: list[Finding]) -> list[str]:
    for each in found:
        assert each.problem.endswith((".", "…")) or each.id in {"E001", "E006"}, each
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


def test_a_missing_sweep_is_found_unless_the_schedule_has_one_of_its_own() -> None:
    assert ids(check_settings(app_with(idempotency_sweep_interval=None))) == ["W003"]
    own = {"sweep": {"task": SWEEP, "schedule": 60}}
    app = app_with(idempotency_sweep_interval=None, beat_schedule=own)
    assert ids(check_settings(app)) == []


@pytest.mark.parametrize(
    ("broker", "options", "found"),
    [
        ("redis://h", {}, []),
        ("redis://h", {"visibility_timeout": 60}, ["W004"]),
        ("redis://h", {"visibility_timeout": 61}, []),
        ("sqs://", {"visibility_timeout": 30}, ["W004"]),
        ("sentinel://h", {"visibility_timeout": 30}, ["W004"]),
        ("amqp://h", {"visibility_timeout": 30}, []),
    ],
)
def test_a_visibility_timeout_that_is_no_longer_than_a_lease_is_found(
    broker: str, options: dict[str, Any], found: list[str]
) -> None:
    app = app_with(broker=broker)
    app.conf.broker_transport_options = options
    assert ids(check_settings(app)) == found


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
        ({"replicas": 2}, ["W010"]),
    ],
)
def test_what_a_server_says_is_judged(change: dict[str, Any], found: list[str]) -> None:
    assert ids(check_store(app_with(Told(replace(GOOD, **change))))) == found


def test_replicas_that_claims_wait_for_are_well() -> None:
    assert ids(check_store(app_with(Told(replace(GOOD, replicas=2), replicas=1)))) == []


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
    finally:
        told_redis.execute_command("ACL", "DELUSER", "shy")


def _nothing() -> None:
    """What a task does here."""
