"""Two apps with one database, a broker each, and the same name for a group: what one has to say is not the other's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.sql.outbox_support import Stage, ids, make_app

pytest.importorskip("django")

from django.db import connections

Apps = tuple[Stage, Stage]


@contextmanager
def two_apps(alias: str) -> Iterator[Apps]:
    with closing(make_app(alias)) as one, closing(make_app(alias)) as two:
        yield Stage(alias, one), Stage(alias, two)


@pytest.fixture
def apps(alias: str) -> Iterator[Apps]:
    """Two apps with their outbox in each kind of database in turn."""
    with two_apps(alias) as apps:
        yield apps


@pytest.fixture
def lite_apps(use_database: Callable[..., str]) -> Iterator[Apps]:
    """The same in SQLite, where the database makes no difference."""
    with two_apps(use_database("sqlite")) as apps:
        yield apps


def stage_in_turn(*apps: Stage) -> list[list[str]]:
    """Stage three messages of each app, one of each at a time, and be gone before anything is sent."""
    staged = [[each.dies_after_commit(n, group="orders")[0] for each in apps] for n in range(3)]
    return [list(ids) for ids in zip(*staged, strict=True)]


def waiting(stage: Stage) -> list[str]:
    return [each.task_id for each in stage.pending()]


def test_a_sweep_sends_to_its_broker_what_is_for_it_and_nothing_else(apps: Apps):
    one, two = apps
    first, second = stage_in_turn(one, two)
    one.pass_time()
    assert two.sweep().sent == 3
    assert (ids(one.app), ids(two.app)) == ([], second)
    assert waiting(one) == first
    assert one.sweep().sent == 3
    assert (ids(one.app), ids(two.app)) == (first, [])
    assert one.pending() == []


def test_a_sweep_does_not_wait_for_one_of_another_app(apps: Apps, monkeypatch: pytest.MonkeyPatch):
    one, two = apps
    first, second = stage_in_turn(one, two)
    one.pass_time()
    publish = one.app.amqp.send_task_message
    swept: list[int] = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        swept.append(two.sweep().sent)
        return publish(*args, **options)

    monkeypatch.setattr(one.app.amqp, "send_task_message", meanwhile)
    assert one.sweep().sent == 3
    assert swept == [3, 0, 0]
    assert (ids(one.app), ids(two.app)) == (first, second)


def test_a_broker_that_is_down_keeps_nothing_from_another(
    apps: Apps, monkeypatch: pytest.MonkeyPatch
):
    one, two = apps
    one.break_broker(monkeypatch)
    with one.atomic():
        first = one.notes(1, group="orders")
    with two.atomic():
        second = two.notes(2, group="orders")
    assert ids(two.app) == second
    left = two.dies_after_commit(3, group="orders")
    two.rows.filter(task_id=left[0]).update(due_ms=0)
    assert two.sweep().sent == 1
    assert ids(two.app) == left

    one.pass_time()
    third = two.dies_after_commit(4, group="orders")
    assert one.sweep().failed == 1
    (failed, other) = one.pending()
    assert (failed.task_id, failed.attempts, other.task_id) == (first[0], 2, third[0])
    assert other.due_in_ms > 30_000, "it does not rest with the other app's"


def test_a_group_that_is_sent_by_hand_is_that_of_the_app(lite_apps: Apps):
    one, two = lite_apps
    first, second = stage_in_turn(one, two)
    one.rows.update(holder="")
    report = two.outbox.send(two.app, "orders", using=two.alias)
    assert (report.sent, report.more) == (3, False)
    assert (ids(one.app), ids(two.app)) == ([], second)
    assert waiting(one) == first


def test_what_one_transaction_stages_for_two_apps_is_two_groups(
    lite_apps: Apps, monkeypatch: pytest.MonkeyPatch
):
    one, two = lite_apps
    one.break_broker(monkeypatch)
    with one.atomic():
        staged = [each.notes(n)[0] for n, each in zip(range(6), itertools.cycle((one, two)))]
        assert len({each.group for each in one.pending()}) == 2
    assert ids(two.app) == staged[1::2]
    assert waiting(one) == staged[0::2]
    assert [each.attempts for each in one.pending()] == [1, 0, 0]
    monkeypatch.undo()
    one.pass_time()
    assert one.sweep().sent == 3
    assert ids(one.app) == staged[0::2]


def test_each_transaction_has_one_group_also_where_a_part_of_it_was_rolled_back(lite_apps: Apps):
    one, _ = lite_apps
    groups = []
    for number in range(2):
        with one.atomic():
            one.rolls_back(number)
            one.notes(number)
            connections[one.alias].run_on_commit.clear()
        groups.append({each.group for each in one.pending()})
    assert len(groups[0]) == 1
    assert len(groups[1]) == 2
