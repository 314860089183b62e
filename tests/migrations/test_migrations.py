"""What the libraries that are migrated from have in common: lost workers, redeliveries, the deploy after them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.migrations.conftest import LEASE, PATIENCE, Shop
from tests.support.sites import Message
from tests.support.waiting import wait_for


@dataclass(frozen=True, kw_only=True)
class Library:
    """The names of one task, before and after; what a redelivery did while the first run was at work."""

    before: str
    after: str
    beside: bool = False
    #: Does a duplicate end without a value? Else it gets the first task's result.
    drops: bool = False


LIBRARIES = {
    "celery-once": Library(
        before="migrating_celery_once_before.report",
        after="migrating_celery_once_after.report",
        beside=True,
    ),
    "celery-singleton": Library(
        before="migrating_celery_singleton_before.sync",
        after="migrating_celery_singleton_after.sync",
    ),
    "redis-lock": Library(
        before="migrating_redis_lock_before.sync",
        after="migrating_redis_lock_after.sync",
        drops=True,
    ),
}


def for_task(message: Message, name: str) -> Message:
    """Return the message as a worker reads it that has another task by this name."""
    return replace(message, headers={**message.headers, "task": name})


each = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


@each
def test_a_killed_worker_is_followed_by_another_run(shop: Shop, key: str, library: Library):
    shop.order("kill", key)
    assert shop.publish(library.after, key).get(timeout=PATIENCE)
    assert (shop.starts(key), shop.ends(key)) == (2, 1)


@each
def test_a_redelivery_ran_again(shop: Shop, key: str, library: Library):
    message = shop.message(library.before, key)
    for times in (1, 2):
        if library.beside:
            shop.order(f"closed{times}", key)
        shop.deliver(message)
        shop.started(key, times)
        lock = f"lock-sync-{key}"
        wait_for(lambda lock=lock: not shop.redis.exists(lock), PATIENCE, "the lock to go")  # type: ignore[misc]
    assert not (library.beside and shop.ends(key))


@each
def test_a_redelivery_does_not_run(shop: Shop, key: str, library: Library):
    message = shop.message(library.after, key)
    gate = shop.order("closed1", key)
    first = shop.deliver(message)
    shop.started(key)
    shop.deliver(message)
    shop.passed()
    gate.unlink()
    first.get(timeout=PATIENCE)
    shop.deliver(message)
    shop.passed()
    assert (shop.starts(key), shop.ends(key)) == (1, 1)


@each
def test_a_new_worker_runs_old_messages_once(shop: Shop, key: str, library: Library):
    message = shop.message(library.before, key)
    assert not [name for name in message.headers if name.startswith("idempotency")]
    gate = shop.order("closed1", key)
    first = shop.deliver(for_task(message, library.after))
    shop.started(key)
    again = shop.publish(library.after, key)
    if library.drops:
        wait_for(lambda: str(again.state) == "IGNORED", PATIENCE, "the duplicate to be dropped")
    else:
        assert again.id == first.id
    gate.unlink()
    first.get(timeout=PATIENCE)
    assert shop.starts(key) == 1


@each
def test_an_old_worker_runs_new_messages(shop: Shop, key: str, library: Library):
    message = shop.message(library.after, key)
    shop.deliver(for_task(message, library.before)).get(timeout=PATIENCE)
    assert shop.starts(key) == 1


@each
def test_a_duplicate_does_not_run_while_the_first_is_at_work_for_longer_than_its_lease(
    shop: Shop, key: str, library: Library
):
    gate = shop.order("closed1", key)
    first = shop.publish(library.after, key)
    shop.started(key)
    began = shop.redis.time()[0]
    wait_for(lambda: shop.redis.time()[0] - began > 1.5 * LEASE, PATIENCE, "more than a lease")
    again = shop.publish(library.after, key)
    if library.drops:
        wait_for(lambda: str(again.state) == "IGNORED", PATIENCE, "the duplicate to be dropped")
    else:
        assert again.id == first.id
    gate.unlink()
    first.get(timeout=PATIENCE)
    shop.passed()
    assert shop.starts(key) == 1


@each
def test_after_the_end_and_after_a_failure_the_next_call_runs(
    shop: Shop, key: str, library: Library
):
    first, second = (
        shop.publish(library.after, key).get(timeout=PATIENCE) for _ in ("first", "second")
    )
    assert first != second
    shop.order("fail", key)
    shop.publish(library.after, key).get(timeout=PATIENCE, propagate=False)
    shop.publish(library.after, key).get(timeout=PATIENCE)
    assert shop.ends(key) >= 3
