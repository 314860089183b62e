"""A deploy that changes names or keys: what is kept, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.stores.memory import MemoryStore
from tests.support.versions import Version


@pytest.fixture
def version() -> Iterator[Callable[..., Version]]:
    """Make versions of the app with one store for their records."""
    store, made = MemoryStore(), list[Version]()

    def version(**options: Any) -> Version:
        made.append(Version(store, **{"idempotency_key": "order", **options}))
        return made[-1]

    yield version
    for each in made:
        each.close()


def test_a_renamed_task_keeps_its_records_by_its_namespace(version):
    before, after = version(), version(name="pay", idempotency_namespace="charge")
    before.run(before.publish("o-1"))
    assert after.run(after.publish("o-1")) == ("SUCCESS", "receipt")
    assert after.runs == []


def test_a_message_in_flight_keeps_the_key_that_it_carries(version):
    before, after = version(), version(idempotency_key=("order", "kind"))
    first, second = before.publish("o-1"), before.publish("o-1")
    before.run(first)
    assert after.run(second) == ("SUCCESS", "receipt")
    assert after.runs == []


def test_a_call_that_is_repeated_after_a_change_of_its_key_runs_again(version):
    before, after = version(), version(idempotency_key=("order", "kind"))
    before.run(before.publish("o-1"))
    after.run(after.publish("o-1"))
    assert after.runs == [("o-1", "sale")]
