"""The first page: totals, trouble, errors and charts of what was counted, whether sweeps run; and all in one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any
from unittest.mock import Mock

import pytest
from django.core import checks
from django.test import Client, RequestFactory

from celery_idempotent.celery import sweep
from celery_idempotent.celery.story import OUTBOX_MS
from celery_idempotent.records import Counted, State
from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.base import MINUTE
from tests.admin.pages import LIST, OVERVIEW, address, keys, text
from tests.support.admin import TASK, claim, settle
from tests.support.waiting import wait_for

Serve = Callable[..., Any]


def counted(minute: int, outcome: str, count: int, task: str = "t") -> Counted:
    return Counted(start_ms=minute * 60_000, task=task, outcome=outcome, count=count)


def test_counters_become_bars_whose_heights_add_up(project: None) -> None:
    from celery_idempotent.django.admin.overview import chart  # which needs Django set up

    found = [
        counted(99, "claimed", 2),
        counted(99, "claimed", 4, "another task"),
        counted(99, "released", 1),  # it raised, or asked for a retry
        counted(99, "failed", 1),
        counted(99, "failed:ValueError", 1),  # no more of them
        counted(99, "replayed", 2),
        counted(100, "conflicted", 3),
        counted(100, "lease_lost", 1),
        counted(100, "settled", 50),  # the end of what `claimed` began
        counted(76, "claimed", 1000),  # before the first minute
    ]
    drawn = chart(found, MINUTE, 24, 100 * 60_000 + 59_999)
    assert drawn.summary == "runs 6, releases 1, failures 1, replays 2, conflicts 3, trouble 1"
    assert drawn.highest == 8
    assert [bar[:4] for bar in drawn.bars] == [
        ("runs", 221, 50.0, 50.0),
        ("releases", 221, 37.5, 12.5),
        ("failures", 221, 25.0, 12.5),
        ("replays", 221, 0.0, 25.0),
        ("conflicts", 231, 62.5, 37.5),
        ("trouble", 231, 50.0, 12.5),
    ]
    assert drawn.bars[0][4] == "1970-01-01 01:39 UTC: runs 6"


def test_the_first_page_tells_what_is_wrong(store: Any, app: Any, operator: Client) -> None:
    """Totals as links, failures by task and class, outcomes by minute or hour, the newest of what ended badly."""
    ours = {(TASK, "claimed"): 1200, (TASK, "released"): 40, (TASK, "replayed"): 3}
    errors = {(TASK, "released:ConnectionError"): 40, (TASK, "failed:Declined"): 1}
    store.count({**ours, **errors, ("other", "claimed"): 1, (sweep.SWEEP, "swept"): 9})
    settle(store, claim(store, "done"))
    settle(store, claim(store, "declined"), State.FAILED, error="Declined: no funds")
    record = claim(store, "crashed")
    store.interrupt(record.identity, token=record.token)
    claim(store, "live")
    page: Any = operator.get(OVERVIEW)
    for told in (
        f"1 live 0 stale{' 0 queued' * ('redis' not in repr(store).lower())} 1 interrupted 1 failed",
        "All tasks runs 1,201, releases 40, failures 0, replays 3, conflicts 0, trouble 0",
        "none has ended yet: does beat run",
        "up to 1204 a minute",
        "40 ConnectionError in shop.charge: released, without a record",
        "1 Declined in shop.charge: failed for good",
        "crashed INTERRUPTED 0 s ago shop.charge Its lease ended without a result.",
        "declined FAILED 0 s ago shop.charge Declined: no funds",
        "live PROCESSING",
    ):
        assert told in re.sub(r"\d+ s ago", "0 s ago", text(page)), told
    assert address("done") not in page.content.decode()
    links = re.findall(rf'href="({LIST}\?[^"]+)"', page.content.decode())
    found = {each: keys(operator.get(unescape(each))) for each in links}
    assert found[f"{LIST}?state=live"] == {"live"}
    assert found[f"{LIST}?state=FAILED&amp;task={TASK}&amp;error=Declined"] == {"declined"}
    day = text(operator.get(f"{OVERVIEW}?hours=24"))
    assert re.search("up to 12.. an hour .+ Errors of the last 24 hours 40 ConnectionError", day)
    sweep.sweep(app)
    ended = r"Sweeps are due every 30 s, and the last ended \d s ago\."
    assert re.search(ended, text(operator.get(OVERVIEW)))
    claim(store, "stale", lease_ms=1)
    wait_for(lambda: store.stats().stale, what="a lease that ran out")
    assert "stale PROCESSING, stale" in text(operator.get(OVERVIEW))


def test_the_first_page_takes_less_than_twelve_trips(
    prefix: str, redis_url: str, serve: Serve, operator: Client
) -> None:
    store: Any = open_store(f"{redis_url}?prefix={prefix}")
    serve(store)
    for n in range(30):
        settle(store, claim(store, f"failed-{n}"), State.FAILED, error="Declined")
        claim(store, f"live-{n}")
        claim(store, f"stale-{n}", lease_ms=1)
    store.count({(f"task-{n}", "claimed"): 1 for n in range(30)})
    operator.get(OVERVIEW)
    trips = store._link.exchange = Mock(wraps=store._link.exchange)
    assert "runs 30" in text(operator.get(OVERVIEW))
    assert 5 < trips.call_count < 12
    store.close()


def test_the_system_checks_ask_no_server_unless_deploying(serve: Serve, project: None) -> None:
    serve("redis://127.0.0.1:1/0", idempotency_sweep_interval=None)
    found = checks.run_checks(tags=["idempotency"])
    assert [each.id for each in found] == ["celery_idempotent.W003"]
    found = checks.run_checks(tags=["idempotency"], include_deployment_checks=True)
    assert {each.id for each in found} == {"celery_idempotent.E006", "celery_idempotent.W003"}


def test_the_index_leads_to_the_first_page(
    memory: Store, serve: Serve, operator: Client, log_in: Callable[..., Client]
) -> None:
    def shown(browser: Client) -> bool:
        return f'"{OVERVIEW}"' in browser.get("/admin/").content.decode()

    serve("nonsense://")
    assert (shown(operator), shown(log_in("view_result"))) == (True, False)


Ask = Callable[..., Any]


@pytest.fixture
def ask(database: None) -> Ask:
    from celery_idempotent.django.health import health

    def ask(method: str = "get") -> Any:
        answer = health(getattr(RequestFactory(), method)("/health/idempotency/"))
        return answer, json.loads(answer.content or "{}")

    return ask


def test_all_is_well_once_a_sweep_has_ended(store: Store, serve: Any, ask: Ask) -> None:
    serve(store, idempotency_sweep_interval=30)
    answer, found = ask()
    assert (answer.status_code, found["store"]["well"]) == (503, True)
    assert found["sweep"] == {"well": False, "ago_s": None}

    store.note_sweep()
    answer, found = ask()
    assert (answer.status_code, found["well"], found["sweep"]["well"]) == (200, True, True)
    assert "no-store" in answer["Cache-Control"]
    assert [ask(method)[0].status_code for method in ("head", "options")] == [200, 405]


def test_a_message_that_waits_for_over_a_minute_is_trouble(serve: Any, ask: Ask) -> None:
    from celery_idempotent.django.models import OutboxMessage

    store = open_store("django://default")
    serve(store, idempotency_sweep_interval=None)
    assert ask()[0].status_code == 200
    now = store.now_ms()
    ages = {"created_ms": now - OUTBOX_MS - 1000, "due_ms": now}
    OutboxMessage.objects.create(app="a", task="t", task_id="i", payload=b"", **ages)
    answer, found = ask()
    assert (answer.status_code, found["outbox"]["well"]) == (503, False)
    assert found["outbox"]["oldest_s"] >= OUTBOX_MS // 1000
    OutboxMessage.objects.all().delete()


def test_a_store_that_does_not_answer_is_told_and_nothing_else(serve: Any, ask: Ask) -> None:
    serve("redis://:secret@127.0.0.1:1/0")
    answer, found = ask()
    assert answer.status_code == 503
    assert found == {"well": False, "store": {"well": False, "problem": "down"}}
