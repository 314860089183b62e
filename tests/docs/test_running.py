"""docs/running.md: settings that are taken, rights that are enough and none too many."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.checks import check_store
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import ClaimRequest, Identity, Selection, SettleRequest, State
from celery_idempotent.stores import get_store, open_store
from tests.delivery import app as app_module
from tests.stores.servers import Server, cluster, redis_binary, running
from tests.stores.verbs import use
from tests.support.admin import make_app
from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.pages import block, load
from tests.support.paths import ROOT
from tests.support.workers import Worker

WORKER = block("running", "worker", "text").split("\n")[1].split()
(MORE,) = re.findall(
    r"^- `([^`]+)` for an operator.s user", (ROOT / "docs" / "running.md").read_text(), re.MULTILINE
)
RIGHTS = {"worker": WORKER, "operator": [*WORKER, *MORE.split()]}
COMMANDS = {who: [each[1:] for each in words if each[0] == "+"] for who, words in RIGHTS.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(redis_binary(), tmp_path_factory.mktemp("rights")) as server:
        yield server


def allow(server: Server, who: str, without: str = "") -> Any:
    """Give a user the rights of the page, but one; return a store that is opened with them."""
    words = [word for word in RIGHTS[who] if word != f"+{without}"]
    assert words[:2] == ["ACL", "SETUSER"]
    user = words[2]
    (password,) = (word[1:] for word in words if word[0] == ">")
    server.client.execute_command("ACL", "DELUSER", user)
    server.client.flushall()
    server.client.script_flush()  # as at first: EVALSHA fails, and EVAL has to be allowed
    server.client.execute_command(*words)
    return open_store(f"redis://{user}:{password}@127.0.0.1:{server.port}/0")


def work(store: Any) -> None:
    use(store)
    store.count({("shop.charge", "settled"): 1})
    if error := store.health().error:
        raise error
    assert store.list(Selection(stale=True)).cursor == ""  # as metrics ask


def look(store: Any) -> None:
    work(store)
    store.stats()
    for state in ("PROCESSING", "COMPLETED", "FAILED"):
        use_one(store, state)
        assert store.list(Selection(states=frozenset({State(state)}))).records
    assert store.counts(hours=2)


def use_one(store: Any, state: str) -> None:
    identity = Identity(namespace="look", key=state)
    answer = store.claim(
        ClaimRequest(identity=identity, attempt=b"12345678", lease_ms=60_000, keep_ms=60_000)
    )
    if state != "PROCESSING":
        end: Any = State(state)
        request = SettleRequest(record=answer.record, state=end, value=None, keep_ms=60_000)
        assert store.settle(request)


DEEDS = {"worker": work, "operator": look}


@pytest.mark.redis
class TestRights:
    @pytest.mark.parametrize("who", RIGHTS)
    def test_they_are_enough(self, server: Server, who: str):
        store = allow(server, who)
        DEEDS[who](store)
        store.close()

    @pytest.mark.parametrize(
        ("who", "command"), [(who, each) for who, found in COMMANDS.items() for each in found]
    )
    def test_none_of_them_is_too_many(self, server: Server, who: str, command: str):
        store = allow(server, who, without=command)
        with pytest.raises(StoreMisconfigured, match=r"rights|permission|can't run"):
            DEEDS[who](store)
        store.close()

    def test_other_keys_are_out_of_reach(self, server: Server):
        allow(server, "worker").close()
        user, password = RIGHTS["worker"][2], "password"
        with pytest.raises(StoreMisconfigured, match=r"rights|permission|can't run"):
            work(open_store(f"redis://{user}:{password}@127.0.0.1:{server.port}/0?prefix=shop"))


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(StoreMisconfigured, match=r"rights|permission|can't run"):
        work()


@pytest.mark.redis
class TestFurtherRights:
    def test_another_database_needs_select(self, server: Server):
        allow(server, "worker").close()
        url = f"redis://idem:password@127.0.0.1:{server.port}/1"
        refused(lambda: use(open_store(url)))
        server.client.execute_command("ACL", "SETUSER", "idem", "+select")
        use(open_store(url))

    def test_the_checks_need_info(self, server: Server):
        allow(server, "worker").close()
        app = make_app(f"redis://idem:password@127.0.0.1:{server.port}/0")
        assert [each.id for each in check_store(app)] == []
        server.client.execute_command("ACL", "SETUSER", "idem", "+info")
        assert [each.id for each in check_store(app)] == []  # it may save snapshots
        server.client.execute_command("ACL", "SETUSER", "idem", "+config|get")
        assert [each.id for each in check_store(app)] == ["W009"]
        get_store(app).close()

    def test_a_cluster_needs_its_slots(self, tmp_path: Path):
        with cluster(redis_binary(), tmp_path) as nodes:
            for node in nodes:
                node.client.execute_command(*RIGHTS["worker"])
            hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            url = f"redis+cluster://idem:password@{hosts}"
            refused(lambda: use(open_store(url)))
            for node in nodes:
                node.client.execute_command(
                    *("ACL", "SETUSER", "idem", "+command", "+cluster|slots", "+asking")
                )
            use(open_store(url))


@pytest.mark.redis
@pytest.mark.worker
def test_a_worker_runs_with_these_rights(
    server: Server, start_worker: Callable[..., Worker], ledger: Ledger
):
    allow(server, "worker").close()
    settings = {
        "broker_url": f"redis://127.0.0.1:{server.port}/2",
        "result_backend": f"redis://127.0.0.1:{server.port}/2",
        "task_default_queue": "rights",
        "broker_connection_retry_on_startup": True,
        "idempotency_store": f"redis://idem:password@127.0.0.1:{server.port}/0",
    }
    worker = start_worker(app_module.__name__, env=app_module.environment(settings))
    app = Celery(set_as_current=False)
    app.conf.update(settings)
    first, second = (app.send_task("keyed", ("order-1",)).get(timeout=30) for _ in range(2))
    assert first == second
    assert ledger.count("start") == 1
    app.send_task("celery_idempotent.sweep").get(timeout=30)
    assert "StoreMisconfigured" not in worker.log
    close_app(app)


@pytest.mark.parametrize("title", ["rabbitmq", "sentinel", "cluster", "tls"])
def test_the_settings_of_the_brokers_page_are_taken(title: str) -> None:
    app = Celery(set_as_current=False)
    load(app, "running", title, {})
    open_store(app.conf.idempotency_store).close()
    app.close()
