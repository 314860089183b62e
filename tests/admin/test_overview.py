"""The first page: totals, trouble, errors and charts of what the store counted, and whether sweeps run."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any
from unittest.mock import Mock

from django.core import checks
from django.test import Client

from celery_idempotent.celery import sweep
from celery_idempotent.records import Counted, State, moment
from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.base import MINUTE
from tests.admin.pages import LIST, OVERVIEW, address, keys, text
from tests.support.admin import TASK, claim, settle
from tests.support.waiting import wait_for

Serve = Callable[..., Any]
OUTBOX = "/admin/celery_idempotent/outboxmessage/"


def counted(minute: int, outcome: str, count: int, task: str = "t") -> Counted:
    return Counted(start_ms=minute * 60_000, task=task, outcome=outcome, count=count)


def test_counters_become_bars_whose_heights_add_up(project: None) -> None:
    from celery_idempotent.django.admin.overview import charts  # which needs Django set up

    found = [
        counted(99, "claimed", 6),
        counted(99, "released", 1),  # it raised, or asked for a retry
        counted(99, "failed", 1),
        counted(99, "failed:ValueError", 1),  # no more of them
        counted(99, "replayed", 2),
        counted(100, "conflicted", 3),
        counted(100, "lease_lost", 1),
        counted(100, "settled", 50),  # the end of what `claimed` began
        counted(76, "claimed", 1000),  # before the first minute
    ]
    (alone,) = charts(found, MINUTE, 24, 100 * 60_000 + 59_999)
    found.append(counted(99, "claimed", 3, "less busy"))
    every, chart, other = charts(found, MINUTE, 24, 100 * 60_000)
    assert chart == alone
    assert list(chart.totals.values()) == [6, 1, 1, 2, 3, 1]
    assert list(every.totals.values()) == [9, 1, 1, 2, 3, 1]
    assert chart.summary == "runs 6, releases 1, failures 1, replays 2, conflicts 3, trouble 1"
    assert (every.task, other.task, chart.highest) == ("", "less busy", 8)
    assert [bar[:4] for bar in chart.bars] == [
        ("runs", 221, 50.0, 50.0),
        ("releases", 221, 37.5, 12.5),
        ("failures", 221, 25.0, 12.5),
        ("replays", 221, 0.0, 25.0),
        ("conflicts", 231, 62.5, 37.5),
        ("trouble", 231, 50.0, 12.5),
    ]
    assert chart.bars[0][4] == "1970-01-01 01:39 UTC: runs 6"


def test_the_first_page_tells_what_is_wrong(store: Any, serve: Serve, operator: Client) -> None:
    """Totals as links, failures by task and class, outcomes by minute or hour, the newest of what ended badly."""
    app = serve(store)
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
        "crashed INTERRUPTED Its lease ended without a result.",
        "declined FAILED Declined: no funds",
        "live PROCESSING",
    ):
        assert told in text(page), told
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
    assert "And 22 less busy tasks." in text(operator.get(OVERVIEW))
    assert 5 < trips.call_count < 12
    store.close()


def test_the_system_checks_ask_no_server_unless_deploying(serve: Serve, project: None) -> None:
    serve("redis://127.0.0.1:1/0", idempotency_sweep_interval=None)
    found = checks.run_checks(tags=["idempotency"])
    assert [each.id for each in found] == ["celery_idempotent.W003"]
    found = checks.run_checks(tags=["idempotency"], include_deployment_checks=True)
    assert {each.id for each in found} == {"celery_idempotent.E006", "celery_idempotent.W003"}


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


def test_the_index_leads_to_the_first_page_and_to_an_outbox_that_the_store_has(
    memory: Store, serve: Serve, operator: Client, log_in: Callable[..., Client]
) -> None:
    def shown(browser: Client) -> tuple[bool, bool]:
        page = browser.get("/admin/").content.decode()
        return f'"{OVERVIEW}"' in page, OUTBOX in page

    serve(memory)
    assert shown(operator) == (True, False)
    assert operator.get(OUTBOX).status_code == 403
    assert shown(log_in("view_result")) == (False, False)
    serve("django://default")
    assert shown(operator) == (True, True)
    assert operator.get(OUTBOX).status_code == 200
    serve("nonsense://")
    assert shown(operator) == (True, False)
