"""``idempotency_publish_once``: the first publish wins, and nothing that goes wrong keeps the next one from it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import chain, chord, group
from kombu.exceptions import OperationalError

from celery_idempotent.celery import publishing
from celery_idempotent.records import State
from tests.policies import app as app_module
from tests.policies.conftest import PATIENCE, Site
from tests.support.apps import environment
from tests.support.proxy import Proxy
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import child_environment


@pytest.fixture(params=[REDIS, RABBITMQ_TOO])
def unattended(request, open_site):
    """A site whose queue nobody reads."""
    site = open_site(request.param)
    with site.app.connection_for_write() as connection:
        site.app.amqp.queues[site.queue].bind(connection.default_channel).declare()
    return site


@pytest.fixture
def short(monkeypatch):
    """Reservations that count as lost after a second."""
    monkeypatch.setattr(publishing, "RESERVED_MS", 1000)
    return 1.0


def state_of(site: Site, key: str, name: str = "once") -> State | None:
    record = site.record(name, key)
    return None if record is None else record.state


class TestSecondPublish:
    def test_it_returns_the_first_result_and_publishes_nothing(self, unattended, key):
        first = unattended.publish("once", key)
        again = [unattended.publish("once", key) for _ in range(3)]
        again.append(unattended.app.tasks["once"].delay(key))
        again.append(unattended.app.tasks["once"].s(key).apply_async())
        assert {each.id for each in again} == {first.id}
        assert type(again[0]) is type(first)
        wait_for(lambda: unattended.length() == 1, PATIENCE, "one message")
        assert state_of(unattended, key) is State.QUEUED

    def test_many_publishers_at_once_publish_once(self, unattended, key):
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: unattended.publish("once", key), range(16)))
        assert len({each.id for each in results}) == 1
        wait_for(lambda: unattended.length() == 1, PATIENCE, "one message")

    def test_a_running_and_a_completed_key_are_not_published(self, shared, key, gate):
        first = shared.publish("once", key, gate.path)
        shared.noted("start", key)
        assert shared.publish("once", key, gate.path).id == first.id
        gate.open()
        value = first.get(timeout=PATIENCE)
        second = shared.publish("once", key, gate.path)
        assert (second.id, second.get(timeout=PATIENCE)) == (first.id, value)
        shared.idle(key)
        assert len(shared.receipts(key)) == 1
        assert shared.ledger.count("start", key) == 1

    def test_a_countdown_keeps_the_reservation_for_as_long(self, unattended, key, short):
        first = unattended.publish("once", key, countdown=5)
        time.sleep(2 * short)
        assert unattended.publish("once", key).id == first.id
        assert unattended.length() == 1


class TestNothingLeaks:
    @pytest.mark.rabbitmq
    def test_a_publish_that_fails_reserves_nothing(self, open_site, key):
        site = open_site("rabbitmq")
        url = urlsplit(site.settings["broker_url"])
        with Proxy(url.hostname or "127.0.0.1", url.port or 5672) as proxy:
            address = url.netloc.rpartition("@")[0] + f"@127.0.0.1:{proxy.port}"
            behind = {**site.settings, "broker_url": url._replace(netloc=address).geturl()}
            behind["broker_transport_options"] = {"max_retries": 1, "interval_start": 0}
            app = app_module.make_app(behind)
            once = app.tasks["once"]
            proxy.refuse()
            with pytest.raises(OperationalError):
                once.apply_async((key,), retry=False)
            assert state_of(site, key) is None
            proxy.heal()
            first = once.apply_async((key,))
            assert once.apply_async((key,)).id == first.id
            wait_for(lambda: site.length() == 1, PATIENCE, "one message")
            app.close()

    def test_a_producer_that_dies_after_reserving_blocks_nobody(self, unattended, key, short):
        """The next publish after the deadline goes out under the same task id."""
        program = """
            import os
            from celery.signals import before_task_publish
            from celery_idempotent.celery import publishing
            from tests.policies import app as app_module

            publishing.RESERVED_MS = 6000
            before_task_publish.connect(lambda **_: os._exit(9), weak=False)
            app_module.app.tasks["once"].delay(os.environ["KEY"])
        """
        env = {**environment(unattended.settings), "KEY": key}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**child_environment(env), "PATH": os.environ["PATH"]},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 9, done.stderr.decode()
        record = unattended.record("once", key)
        assert record is not None
        assert record.state is State.QUEUED
        assert unattended.publish("once", key).id == record.task_id
        assert unattended.length() == 0

        def publish() -> bool:
            assert unattended.publish("once", key).id == record.task_id
            return bool(unattended.length())

        wait_for(publish, PATIENCE, "a publish after the deadline", interval=0.2)
        for _ in range(3):
            assert unattended.publish("once", key).id == record.task_id
        assert unattended.length() == 1

    @pytest.mark.parametrize("why", ["revoked", "expired"])
    def test_a_task_that_a_worker_discards_keeps_its_key_until_it_is_forgotten(
        self, on_redis, key, short, why
    ):
        """The worker discards every message of its task id: after a forget the next publish has another."""
        blocker = self.occupy(on_redis, key)
        first = on_redis.publish("once", key, expires=0.3 if why == "expired" else None)
        if why == "revoked":
            first.revoke()
        time.sleep(0.5)
        blocker.open()
        on_redis.noted("revoked", task_id=first.id)
        assert on_redis.publish("once", key).id == first.id
        assert on_redis.app.tasks["once"].idempotency_forget(key)
        self.runs_after(on_redis, key)

    @pytest.fixture(autouse=True)
    def _blocker(self, gate):
        self.gate = gate

    def occupy(self, site: Site, key: str) -> Any:
        """Keep all processes of the worker busy until the gate opens."""
        for n in range(4):
            site.publish("work", f"{key}.busy{n}", self.gate.path)
        for n in range(4):
            site.noted("start", f"{key}.busy{n}")
        return self.gate

    @staticmethod
    def runs_after(site: Site, key: str) -> None:
        """The next publish after the deadline of the reservation takes effect."""

        def publish() -> bool:
            site.publish("once", key)
            return site.ledger.count("end", key) > 0

        wait_for(publish, PATIENCE, "a publish that takes effect", interval=0.2)
        site.idle(key)
        assert site.ledger.count("start", key) == 1
        assert state_of(site, key) is State.COMPLETED


class TestAlwaysOut:
    def test_a_publish_between_a_run_and_its_retry_is_the_first_task(self, on_redis, key):
        first = on_redis.publish("once_retrying", key)
        seen = set()
        # Not until the result is there: a busy worker may store that it retries after the retry has stored its result.
        while not on_redis.ledger.count("end", key):
            seen.add(on_redis.publish("once_retrying", key).id)
        assert seen == {first.id}
        on_redis.idle(key)
        assert on_redis.ledger.count("start", key) == 2

    def test_everything_in_a_canvas_is_published(self, shared, key):
        once = shared.app.tasks["once"]
        grouped: Any = group([once.s(key), once.s(key)], app=shared.app).apply_async()
        values = grouped.get(timeout=PATIENCE)
        assert values[0] == values[1]
        assert len({each.id for each in grouped.results}) == 2
        echo = shared.app.tasks["echo"]
        chorded = chord([once.s(key), once.s(key)], echo.s(), app=shared.app).apply_async()
        assert chorded.get(timeout=PATIENCE) == values
        chained = chain(once.si(key), echo.s(), once.si(key), echo.s()).apply_async()
        assert chained.get(timeout=PATIENCE) == values[0]
        shared.idle(key)
        assert shared.ledger.count("start", key) == 1
        # A member that meets the other goes round, under its own id.
        assert len({each["id"] for each in shared.receipts(key) if each["name"] == "once"}) == 6

    def test_a_call_with_callbacks_is_published_and_calls_back(self, on_redis, key):
        first = on_redis.publish("once", key)
        first.get(timeout=PATIENCE)
        second = on_redis.publish("once", key, link=on_redis.app.tasks["say"].si(f"{key}/a"))
        assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
        on_redis.noted("effect", f"{key}/a")
