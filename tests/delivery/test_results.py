"""Other serializers, another result backend: a chord and its records still agree."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.signals import before_task_publish

from tests.delivery.sides import PATIENCE, Side
from tests.support.servers import embedded_redis
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.worker,
    pytest.mark.redis,
    # Of Celery's result backend, with the newest redis-py.
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


#: Settings beside the address of the result backend: ``{redis}`` and ``{directory}`` are filled in.
VARIANTS: dict[str, dict[str, Any]] = {
    "database, pickle": {
        "result_backend": "db+sqlite:///{directory}/results.sqlite",
        "task_serializer": "pickle",
        "result_serializer": "pickle",
        "accept_content": ["pickle"],
    },
    "redis, msgpack": {
        "result_backend": "{redis}",
        "task_serializer": "msgpack",
        "result_serializer": "msgpack",
        "accept_content": ["msgpack"],
    },
}


@pytest.fixture(params=["database, pickle", pytest.param("redis, msgpack", marks=pytest.mark.wide)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    """A worker with our class and one of the variants."""
    with embedded_redis() as server:
        conf = {
            "broker_url": server.url(0),
            "broker_connection_retry_on_startup": True,
            "idempotency_store": server.url(2),
            **VARIANTS[request.param],
        }
        address = {"redis": server.url(1), "directory": tmp_path}
        conf["result_backend"] = conf["result_backend"].format(**address)
        name = f"results-{uuid.uuid4().hex[:6]}"
        side = Side(name, ours=True, directory=tmp_path, conf=conf, concurrency=2)
        try:
            side.start()
            yield side
        finally:
            side.close()


@pytest.fixture
def published() -> Iterator[dict[str, tuple[Any, dict[str, Any]]]]:
    """By task id, the body and the headers of each message that this process sends."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}

    def receive(body: Any, headers: dict[str, Any], **_: Any) -> None:
        found[headers["id"]] = (body, dict(headers))

    before_task_publish.connect(receive, weak=False)
    yield found
    before_task_publish.disconnect(receive)


def test_members_that_are_delivered_twice_count_once(site, published):
    """The second delivery comes when its chord is complete but for one member."""
    tasks = site.app.tasks
    gate = site.recorder.path.with_name(f"gate-{uuid.uuid4().hex}")
    key = uuid.uuid4().hex
    header = [tasks["tests.quiet"].s(2), tasks["tests.quiet"].s(4)]
    last = tasks["tests.keyed"].s(key, str(gate))
    result = chord([*header, last], tasks["tests.echo"].s(), app=site.app).apply_async()
    members = [each.id for each in result.parent.results]
    for task_id in members[:2]:
        wait_for(lambda task_id=task_id: ends(site, task_id) == 1, PATIENCE, "the first run")
        deliver(site, task_id, *published[task_id])
        wait_for(lambda task_id=task_id: ends(site, task_id) == 2, PATIENCE, "the second one")
        assert kinds(site, task_id).count("note") == 1
    gate.touch()
    gathered, _ = result.get(timeout=PATIENCE)
    assert sorted(gathered[0], key=str) == [2, 4, "done"]


def kinds(site: Side, task_id: str) -> list[str]:
    site.pump()
    return [line["kind"] for line in list(site.lines[task_id])]


def ends(site: Side, task_id: str) -> int:
    return kinds(site, task_id).count("postrun")


def deliver(site: Side, task_id: str, body: Any, headers: dict[str, Any]) -> None:
    """Send a message again as it was."""
    with site.app.producer_pool.acquire(block=True) as producer:
        producer.publish(
            body,
            serializer=site.app.conf.task_serializer,
            routing_key=site.queue,
            headers=headers,
            correlation_id=task_id,
        )
