"""Metrics of a real worker: what its pool's processes count, what the store says, and which names alerts rely on."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from docs.generated import fill
from tests.delivery.app import Refused, make_app
from tests.stores.servers import free_port
from tests.support.apps import close_app, environment
from tests.support.paths import ROOT
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@dataclass
class Scraped:
    """A worker with metrics, and a publisher of its tasks."""

    app: Any
    port: int
    worker: Any

    def families(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of this name that have these labels."""
        return sum(
            float(sample.value)
            for family in self.families().values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture
def serve(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], tmp_path: Path
) -> Iterator[Callable[..., Scraped]]:
    """Start a worker with metrics; ``several``: its processes write theirs to a directory."""
    url, port = private_redis.url(), free_port()
    settings = {"broker_url": url, "result_backend": url, "idempotency_lease": 1}
    app = make_app(settings)

    def start(*, several: bool = True, **options: Any) -> Scraped:
        env = environment(settings, metrics_port=port)
        if several:
            (tmp_path / "prometheus").mkdir()
            env["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path / "prometheus")
        worker = start_worker("tests.delivery.app", env=env, fresh=True, **options)
        return Scraped(app, port, worker)

    yield start
    close_app(app)


def documented() -> set[str]:
    text = fill((ROOT / "docs" / "operating.md").read_text())
    return set(re.findall(r"^- `(celery_idempotency_\w+)`", text, re.MULTILINE))


OUTCOMES = "celery_idempotency_outcomes_total"


def test_a_scrape_has_what_every_process_counted_and_what_the_store_says(
    serve: Callable[..., Scraped], gate: Any, private_redis: EmbeddedRedis
) -> None:
    scraped = serve(concurrency=2)
    tasks = scraped.app.tasks
    for number in range(6):
        tasks["keyed"].delay(f"k{number}").get(timeout=20)
    assert tasks["keyed"].delay("k0").get(timeout=20)
    with pytest.raises(Refused):
        tasks["refused"].delay("k").get(timeout=20)
    tasks["keyed"].delay("held", gate=str(gate.path))
    wait_for(lambda: scraped.value(OUTCOMES, task="keyed", outcome="claimed") == 7, 20)

    assert scraped.value(OUTCOMES, task="keyed", outcome="settled", state="COMPLETED") == 6
    assert scraped.value(OUTCOMES, task="keyed", outcome="replayed") == 1
    failed = {"task": "refused", "outcome": "settled", "state": "FAILED", "error": "Refused"}
    assert scraped.value(OUTCOMES, **failed) == 1
    for outcome, count in (("claimed", 7), ("settled", 6), ("replayed", 1)):
        timed = {"task": "keyed", "outcome": outcome}
        assert scraped.value("celery_idempotency_seconds_count", **timed) == count
        assert 0 < scraped.value("celery_idempotency_seconds_sum", **timed) < 60
    assert scraped.value("celery_idempotency_store_up") == 1
    assert scraped.value("celery_idempotency_records", state="live") == 1
    assert scraped.value("celery_idempotency_records", state="failed") == 1
    assert "celery_idempotency_last_sweep_age_seconds" not in scraped.families()
    tasks["celery_idempotent.sweep"].delay().get(timeout=20)
    assert 0 <= scraped.value("celery_idempotency_last_sweep_age_seconds") < 60
    assert {name for name in scraped.families() if name.startswith("celery_i")} == documented()

    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("maxmemory", 1)
        assert scraped.value("celery_idempotency_store_problem", problem="read-only") == 1
        assert scraped.value("celery_idempotency_records", state="failed") == 1
        client.config_set("maxmemory", 0)
    assert scraped.value("celery_idempotency_store_up") == 1

    private_redis.freeze()
    assert scraped.value("celery_idempotency_store_up") == 0
    assert scraped.value("celery_idempotency_store_problem", problem="down") == 1
    assert scraped.value(OUTCOMES, task="keyed", outcome="replayed") == 1
    assert "celery_idempotency_records" not in scraped.families()
    private_redis.thaw()
    wait_for(lambda: scraped.value("celery_idempotency_store_up") == 1, 20)
    private_redis.stop()
    assert scraped.value("celery_idempotency_store_up") == 0


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork"])
def test_a_worker_of_any_pool_serves_without_a_directory(
    serve: Callable[..., Scraped], pool: str
) -> None:
    scraped = serve(several=False, pool=pool)
    assert scraped.app.tasks["keyed"].delay("k").get(timeout=20)
    is_prefork = pool == "prefork"
    assert scraped.value("celery_idempotency_store_up") == 1
    assert scraped.value(OUTCOMES, task="keyed", outcome="claimed") == (not is_prefork)
    assert ("set PROMETHEUS_MULTIPROC_DIR" in scraped.worker.log) == is_prefork


def test_the_files_of_recycled_children_are_marked_dead(serve: Callable[..., Scraped]) -> None:
    scraped = serve(arguments=("--max-tasks-per-child=1",))
    for number in range(3):
        assert scraped.app.tasks["keyed"].delay(f"k{number}").get(timeout=20)
    wait_for(lambda: scraped.value("children") == 1, 20)
    assert scraped.value(OUTCOMES, task="keyed", outcome="claimed") == 3


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_use_names_that_are_served(file: str) -> None:
    text = (ROOT / "docs" / "monitoring" / file).read_text()
    used = {
        re.sub(r"_(total|bucket)$", "", name)
        for name in re.findall(r"celery_idempotency_\w+", text)
    }
    assert used <= documented()
    assert used >= {"celery_idempotency_outcomes", "celery_idempotency_store_up"}


def test_each_alert_says_what_to_do() -> None:
    text = (ROOT / "docs" / "monitoring" / "alerts.yml").read_text()
    assert text.count("- alert: ") == text.count(" description: ")
