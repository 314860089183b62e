"""The charts add up the outcomes that the store counted; their page says whether sweeps run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.core import checks
from django.test import Client

from celery_idempotent.celery import sweep
from celery_idempotent.records import Counted, moment
from celery_idempotent.stores import Store
from tests.admin.pages import LIST, text
from tests.support.admin import TASK

Serve = Callable[..., Any]
CHARTS = f"{LIST}charts/"
OUTBOX = "/admin/celery_idempotent/outboxmessage/"
OUTCOMES = "/admin/celery_idempotent/outcomes/"


def charts(found: list[Counted], **period: int) -> Any:
    # Imported late: it needs Django set up.
    from celery_idempotent.django.admin.charts import charts

    return charts(found, **period)


def counted(hour: int, outcome: str, count: int, task: str = "t") -> Counted:
    return Counted(start_ms=hour * 3_600_000, task=task, outcome=outcome, count=count)


def test_counters_become_bars_whose_heights_add_up(project: None) -> None:
    chart, other = charts(
        [
            counted(99, "claimed", 6),
            counted(99, "released", 1),  # it raised, or asked for a retry
            counted(99, "failed", 1),
            counted(99, "replayed", 2),
            counted(100, "conflicted", 3),
            counted(100, "lease_lost", 1),
            counted(100, "settled", 50),  # the end of what `claimed` began
            counted(76, "claimed", 1000),  # before the first hour
            counted(99, "claimed", 3, "less busy"),
        ],
        last_hour=100,
    )
    assert list(chart.totals.values()) == [6, 1, 1, 2, 3, 1]
    assert chart.summary.startswith(
        "runs 6, releases 1, failures 1, replays 2, conflicts 3, trouble 1"
    )
    assert (other.task, chart.highest) == ("less busy", 8)
    assert [(bar.series, bar.x, bar.y, bar.height) for bar in chart.bars] == [
        ("runs", 221, 50.0, 50.0),
        ("releases", 221, 37.5, 12.5),
        ("failures", 221, 25.0, 12.5),
        ("replays", 221, 0.0, 25.0),
        ("conflicts", 231, 62.5, 37.5),
        ("trouble", 231, 50.0, 12.5),
    ]


def test_outcomes_are_shown_by_task(store: Any, serve: Serve, operator: Client) -> None:
    serve(store)
    ours = {(TASK, "claimed"): 1200, (TASK, "released"): 40, (TASK, "replayed"): 3}
    store.count({**ours, ("other", "claimed"): 1})
    page = text(operator.get(CHARTS))
    assert "runs 1,200, releases 40, failures 0, replays 3, conflicts 0, trouble 0" in page
    assert "up to 1203 an hour" in page


def test_the_page_says_whether_sweeps_run(store: Store, serve: Serve, operator: Client) -> None:
    app = serve(store)
    assert "none has ended yet: does beat run" in text(operator.get(CHARTS))
    sweep.sweep(app)
    page = text(operator.get(CHARTS))
    assert re.search(r"Sweeps are due every 30 s, and the last ended \d s ago\.", page)


def test_the_system_checks_ask_no_server_unless_deploying(serve: Serve, project: None) -> None:
    serve("redis://127.0.0.1:1/0", idempotency_sweep_interval=None)
    found = checks.run_checks(tags=["idempotency"])
    assert [each.id for each in found] == ["celery_idempotent.W003"]
    found = checks.run_checks(tags=["idempotency"], include_deployment_checks=True)
    assert {each.id for each in found} == {"celery_idempotent.E006", "celery_idempotent.W003"}


def test_counts_by_state_are_shown(
    memory: Any, serve: Serve, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(memory)
    found = replace(memory.stats(), live=2, failed=10_000)
    monkeypatch.setattr(memory, "stats", lambda: found)
    assert "2 live , 0 stale , 0 interrupted , 10,000 failed ." in text(operator.get(CHARTS))


def test_messages_that_wait_are_shown_with_their_error_and_never_the_call(
    serve: Serve, operator: Client, log_in: Callable[..., Client], postgresql: str
) -> None:
    from celery_idempotent.django.fields import NowMs
    from celery_idempotent.django.models import OutboxMessage

    serve(f"django://{postgresql}")
    OutboxMessage.objects.using(postgresql).create(
        app="shop",
        task="shop.<b>mail</b>",
        task_id="task-1",
        key="order-1",
        payload=b"the arguments",
        created_ms=NowMs() - 65_000,
        due_ms=NowMs(),
        attempts=2,
        error="OperationalError: no broker",
    )
    try:
        page = operator.get(OUTBOX)
        staged = OutboxMessage.objects.using(postgresql).get()
        assert re.search(rf"Waits since .+ {moment(staged.created_ms).year}, .+ task-1", text(page))
        # Django 4.2 shows nothing for the empty scope, later ones a dash.
        assert re.search("order-1 (- )?2 OperationalError: no broker", text(page))
        assert "<b>mail" not in page.content.decode()
        for address in ("1/change/", "1/delete/", "add/"):
            found = operator.get(OUTBOX + address, follow=True)
            assert "the arguments" not in found.content.decode()
        assert log_in().get(OUTBOX).status_code == 403
    finally:
        OutboxMessage.objects.using(postgresql).all().delete()


def test_the_index_leads_to_the_charts_and_to_an_outbox_that_the_store_has(
    memory: Store, serve: Serve, operator: Client, log_in: Callable[..., Client]
) -> None:
    def shown(browser: Client) -> tuple[bool, bool]:
        page = browser.get("/admin/").content.decode()
        return OUTCOMES in page, OUTBOX in page

    serve(memory)
    assert shown(operator) == (True, False)
    assert operator.get(OUTBOX).status_code == 403
    assert operator.get(OUTCOMES)["Location"] == CHARTS
    assert shown(log_in("view_result")) == (False, False)
    serve("django://default")
    assert shown(operator) == (True, True)
    assert operator.get(OUTBOX).status_code == 200
    serve("nonsense://")
    assert shown(operator) == (True, False)
