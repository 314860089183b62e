"""The timeline of a record's page: what the record knows in its order, and what it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent.records import ClaimRequest, Held, Mismatched, Record, ReserveRequest, State
from celery_idempotent.stores import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.admin.pages import address, text
from tests.support.admin import claim, identity, settle, value

pytest.importorskip("django")

if TYPE_CHECKING:
    from django.test import Client

Serve = Callable[..., Any]
LEASE_MS = 600_000


def refuse(store: Store, kind: str, task_id: str) -> None:
    """Ask for the key "a" in vain."""
    answer = store.claim(
        ClaimRequest(
            identity=identity("a"),
            attempt=os.urandom(8),
            lease_ms=LEASE_MS,
            keep_ms=LEASE_MS,
            fingerprint=bytes(16) if kind == "mismatch" else None,
            task_id=task_id,
        )
    )
    assert isinstance(answer, Held if kind == "conflict" else Mismatched)


def timeline(client: Client) -> list[str]:
    """Return what the page of the key "a" says, each without its time."""
    from html.parser import HTMLParser

    class Items(HTMLParser):
        found: list[str]
        inside = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "ol":
                self.inside, self.found = ("class", "idem-timeline") in attrs, []
            if tag == "li" and self.inside:
                self.found.append("")

        def handle_endtag(self, tag: str) -> None:
            if tag == "ol" and self.inside:
                told.extend(self.found)
                self.inside = False

        def handle_data(self, data: str) -> None:
            if self.inside and self.found:
                self.found[-1] += data

    told: list[str] = []
    Items().feed(client.get(address("a")).content.decode())
    return [" ".join(item.split()) for item in told]


def test_it_tells_what_happened_in_its_order(store: Store, serve: Serve, operator: Client) -> None:
    serve(store)
    record = claim(store, "a")
    refuse(store, "conflict", "task-2")
    settle(store, record, stored=value("17"))
    refuse(store, "mismatch", "<b>task-3</b>")
    store.mark_delivered(record.identity, token=record.token)
    told = timeline(operator)
    assert [item.split(" UTC ", 1)[1] for item in told[:4]] == [
        "The key was first claimed or reserved",
        "Turned away: somebody else held the key (task task-2)",
        "Completed: whoever asks again gets this result",
        "Turned away: its arguments are not those of the first call (task <b>task-3</b>)",
    ]
    assert told[4:] == ["(time not kept) Its callbacks were sent"]
    assert [item[:19] for item in told[:4]] == sorted(item[:19] for item in told[:4])
    assert "Not kept: replays, renewals, sweeps that left it alone." in text(
        operator.get(address("a"))
    )
    assert "<b>task-3" not in operator.get(address("a")).content.decode()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def moved(clock: FakeClock, serve: Serve) -> MemoryStore:
    """A store whose time the test moves."""
    store = MemoryStore(clock)
    serve(store)
    return store


def test_what_has_no_time_is_told_where_it_must_have_been(
    moved: MemoryStore, clock: FakeClock, operator: Client
) -> None:
    record: Record = claim(moved, "a")
    for _ in range(2):
        clock.advance(LEASE_MS + 1)
        record = claim(moved, "a")
    for number in range(6):
        clock.advance(1000)
        refuse(moved, "conflict", f"task-{number}")
    told = timeline(operator)
    assert told[0].endswith("The key was first claimed")
    assert told[1:3] == [
        "(time not kept) Claimed 2 times before",
        "(time not kept) Lost to a crash 2 times",
    ]
    assert told[3].endswith("Claimed by worker-1.example:4711 (attempt 3)")
    assert [item.partition("(")[2] for item in told[4:9]] == [
        f"task task-{n})" for n in range(1, 6)
    ]
    assert told[9].endswith("Its lease runs out, unless it is renewed")
    assert (
        "Not kept: when earlier attempts began and ended, replays, renewals, sweeps that left it alone,"
        " refusals before the last five." in text(operator.get(address("a")))
    )
    settle(moved, record, State.FAILED)
    assert "(time not kept) Claimed 3 times" in timeline(operator)


def test_an_interruption_is_told_by_its_cause(moved: MemoryStore, operator: Client) -> None:
    record = claim(moved, "a")
    moved.checkpoint(record.identity, token=record.token, name="charged", value=value("1"))
    moved.release(record.identity, token=record.token)
    assert timeline(operator)[-1].endswith(
        "Given back with steps done: the next delivery may run the rest"
    )
    moved.interrupt(record.identity, token=claim(moved, "a").token)
    moved.interrupt(record.identity, token=claim(moved, "a").token)
    told = timeline(operator)
    assert told[1:3] == [
        "(time not kept) Claimed 3 times",
        "(time not kept) Lost to a crash once before",
    ]
    assert told[-1].endswith("Interrupted (crash 2): the next delivery may run it")


def test_a_reservation_is_told_from_a_claim(moved: MemoryStore, operator: Client) -> None:
    moved.reserve(
        ReserveRequest(identity=identity("a"), task_id="t", deadline_ms=LEASE_MS, keep_ms=LEASE_MS)
    )
    told = timeline(operator)
    assert told[0].endswith("Reserved: its message was about to be published")
    assert told[1].endswith("Queued: its message is on its way")
    record = claim(moved, "a", task_id="t")
    moved.release(record.identity, token=record.token, requeue_ms=LEASE_MS)
    told = timeline(operator)
    assert any(item.endswith("Queued again: its message is on its way once more") for item in told)
