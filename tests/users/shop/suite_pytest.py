"""A user's suite for pytest-django: nothing in it knows of records, or of how they are kept."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from tests.users.shop.models import Payment
from tests.users.shop.tasks import charge, pay


def paid(order: str) -> int:
    return Payment.objects.filter(order=order).count()


@pytest.mark.parametrize("task", [pay, charge])
@pytest.mark.parametrize("_time", [1, 2])
def test_a_duplicate_in_one_test_is_none_in_the_next(db: None, task: Any, _time: int) -> None:
    assert paid("order") == 0
    assert task.delay("order").get() == task.delay("order").get()
    assert paid("order") == 1


@pytest.mark.parametrize("task", [pay, charge])
@pytest.mark.parametrize("_time", [1, 2])
@pytest.mark.django_db(transaction=True)
def test_the_same_for_real(task: Any, _time: int) -> None:
    assert paid("order") == 0
    assert task.delay("order").get() == task.delay("order").get()
    assert paid("order") == 1


def test_what_follows_is_seen_by_who_captures_it(
    db: None, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        charge.delay("order")
    assert paid("follow-up of order") == 1


@pytest.mark.parametrize("_time", [1, 2])
def test_a_live_server(live_server: Any, _time: int) -> None:
    def post() -> bytes:
        headers = {"Idempotency-Key": '"key"'}
        request = urllib.request.Request(f"{live_server.url}/buy/", b"order=order", headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    assert post() == post()
    assert paid("order") == 1


def test_a_test_that_asks_for_no_database_gets_none() -> None:
    with pytest.raises(RuntimeError, match="Database access not allowed"):
        pay.apply(("order",), throw=True)
