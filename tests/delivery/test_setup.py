"""A worker says at its start what may go wrong, and works all the same."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.celery import checks
from tests.delivery import app
from tests.stores.servers import Server, redis_binary, running
from tests.support.admin import make_app
from tests.support.servers import RabbitMQ
from tests.support.waiting import wait_for
from tests.support.workers import Worker, freeze

pytestmark = [pytest.mark.redis, pytest.mark.worker]

#: What the app of these tests does on purpose.
EARLY = ("WARNING", "W002")

LINE = re.compile(r"\[.*: (WARNING|ERROR)/MainProcess\] idempotency: ([EW]\d+) (.+)")


def findings(worker: Worker) -> list[tuple[str, str]]:
    """Level and id of each line."""
    return [(level, name) for level, name, _ in LINE.findall(worker.log)]


@pytest.fixture(scope="module")
def evicting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis that evicts, and saves nothing."""
    directory = tmp_path_factory.mktemp("evicting")
    with running(redis_binary(), directory, "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.mark.parametrize("pool", ["prefork", pytest.param("solo", marks=pytest.mark.wide)])
def test_each_finding_is_a_line_in_the_log(
    open_site: Callable[..., Any], evicting: Server, key: str, pool: str
) -> None:
    site = open_site("redis", idempotency_store=evicting.url)
    worker = site.worker(pool=pool)
    wait_for(lambda: len(findings(worker)) >= 3, what="three findings")
    assert findings(worker) == [EARLY, ("WARNING", "W008"), ("WARNING", "W009")]
    assert "maxmemory-policy allkeys-lru" in worker.log
    assert "Set appendonly yes" in worker.log
    assert site.app.tasks["keyed"].delay(key).get(timeout=30)


def test_a_store_that_hangs_keeps_no_worker_from_its_start_nor_from_its_end(
    open_site: Callable[..., Any], tmp_path: Path
) -> None:
    with running(redis_binary(), tmp_path) as server:
        freeze(server.process.pid)
        try:
            site = open_site("redis", idempotency_store=f"{server.url}?socket_timeout=2")
            worker = site.worker()
            assert site.app.tasks["plain"].delay("free").get(timeout=30)
            wait_for(lambda: "E006" in worker.log, what="the store's silence to be noticed")
            assert findings(worker) == [EARLY, ("ERROR", "E006")]
            assert " ready." in worker.log.partition("E006")[0]
            again = site.worker(name="stopped")
            again.send_signal(signal.SIGTERM)
            assert again.wait(timeout=30) == 0
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_a_check_that_fails_is_no_more_than_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "check_settings", lambda _: 1 / 0)
    checks.check_in_thread(make_app("memory://"))
    wait_for(lambda: "the checks failed" in caplog.text, what="the line")


class TestRefusals:
    """What cannot work is said at once: the worker does not start, and its messages stay where they are."""

    @pytest.fixture
    def end_of_worker(
        self, start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., str]:
        # Whoever imports the test project, in this process, sets it.
        monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)

        def end_of_worker(**settings: Any) -> str:
            worker = start_worker("tests.delivery.app", env=app.environment(settings), ready=False)
            wait_for(lambda: not worker.running or " ready." in worker.log, 30, "its end, or start")
            assert worker.exit_code == 1
            return worker.log

        return end_of_worker

    @pytest.mark.rabbitmq
    @pytest.mark.parametrize("setting", [{}, {"idempotency_on_store_error": "open"}], ids=str)
    def test_without_a_store_a_worker_leaves_its_messages_alone(
        self,
        rabbitmq: RabbitMQ,
        end_of_worker: Callable[..., str],
        setting: dict[str, Any],
    ) -> None:
        settings = {
            "broker_url": rabbitmq.url,
            "result_backend": "rpc://",
            "task_default_queue": rabbitmq.queue(),
            **setting,
        }
        publisher = app.make_app(settings)
        sent = publisher.tasks["guarded"].delay("k")
        said = end_of_worker(**settings)
        assert "\nidempotency: this worker does not start: set idempotency_store" in said
        with publisher.connection_for_read() as connection:
            queue: Any = publisher.amqp.queues[settings["task_default_queue"]]
            (kept,) = [queue.bind(connection.default_channel).get(no_ack=True)]
        assert kept.headers["id"] == sent.id
        publisher.close()

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"idempotency_store": "django://"}, "DATABASES, but settings are not configured"),
            ({"idempotency_lease": -1}, "idempotency_lease of task"),
            ({"idempotency_stroe": "redis://"}, "did you mean idempotency_store?"),
        ],
        ids=str,
    )
    def test_a_bad_setting_is_the_end_of_a_worker(
        self, end_of_worker: Callable[..., str], settings: dict[str, Any], reason: str
    ) -> None:
        assert reason in end_of_worker(broker_url="memory://", **settings)
