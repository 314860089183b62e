"""Whatever fails between the end of a body and its ack: callbacks are sent, and a body runs once.

A history for each cell of the table in guarantees.md; ``make proof`` plays them all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
from celery import chain

from celery_idempotent import State
from tests.delivery.histories import History, Played, histories, play
from tests.delivery.stand import PATIENCE, Stand, open_stand
from tests.support.paths import ROOT
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

AT_ONCE = 10


@pytest.fixture(scope="module", params=[REDIS, RABBITMQ_TOO])
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    """A worker of as many processes as there are histories at once."""
    rabbitmq = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    directory = tmp_path_factory.mktemp("histories")
    with open_stand(request.param, directory, rabbitmq, concurrency=AT_ONCE) as stand:
        yield stand


def chosen() -> Iterator[History]:
    """Yield of each cell one history for each shape, and one for each other way to call or to acknowledge."""
    seen = set()
    for each in histories():
        usual = (each.acks, each.way) == ("late", "call")
        kind = (each.cell, each.shape) if usual else (each.cell, each.acks, each.way)
        if each.way != "outbox" and kind not in seen:
            seen.add(kind)
            yield each


@pytest.fixture(scope="module")
def played(stand: Stand) -> dict[str, list[Played]]:
    """What was played, by its cell."""
    found = sorted(play(stand, chosen(), at_once=AT_ONCE), key=lambda each: each.history.cell)
    cells = itertools.groupby(found, lambda each: each.history.cell)
    return {cell: list(some) for cell, some in cells}


@pytest.mark.parametrize("cell", "abcdefghijklmno")
def test_a_history_ends_as_its_cell_says(played, cell):
    for each in played[cell]:
        if each.error is not None:
            raise AssertionError(f"{each.history}: {each.error}") from each.error


def test_every_cell_of_the_page_has_histories_and_every_history_a_cell():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    section = page.split("## Callbacks are sent")[1].split("\n## ")[0].split("\n- (a)")[0]
    assert {*re.findall(r"\(([a-z])\)", section)} == {each.cell for each in histories()}


def test_a_result_that_is_stored_with_its_record_is_there_with_it_once(tmp_path):
    own = ("storing", "stored")  # of a result backend of the tests
    wanted = [e for e in histories() if e.shape == "alone" and e.way == "call"]
    with open_stand("redis", tmp_path, None, concurrency=AT_ONCE, together=True) as stand:
        found = play(stand, [e for e in wanted if e.point not in own], at_once=AT_ONCE)
        wrong = {str(each.history): each.error for each in found if each.error}
        assert not wrong
        results = [each.sent.sender.result for each in found if each.ends_well]
        assert {*results} == {"a"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Celery's result backend
@pytest.mark.parametrize("serializer", ["pickle", pytest.param("msgpack", marks=pytest.mark.wide)])
def test_parts_that_are_delivered_twice_count_once_whatever_keeps_their_results(
    tmp_path, serializer
):
    conf = {
        "result_backend": f"db+sqlite:///{tmp_path}/results.sqlite",
        "task_serializer": serializer,
        "result_serializer": serializer,
        "accept_content": [serializer],
    }
    points = ("body", "settling", "settled", "acking")
    parts = [History("body", point, "redelivered") for point in points]
    with open_stand("redis", tmp_path, None, concurrency=4, **conf) as stand:
        assert [each.error for each in play(stand, parts, at_once=4)] == [None] * len(parts)


def test_what_was_sent_beside_what_was_refused_is_sent_again_and_takes_effect_once(stand):
    key = stand.label()
    with stand.refused() as queue:
        first = stand.step(f"{key}/a")
        first.link(stand.step(f"{key}/b"))
        first.link(chain(stand.step(f"{key}/c"), stand.step(f"{key}/d")))
        first.link(stand.step(f"{key}/e", queue=queue))
        result = first.apply_async()
        stand.says(f"[{result.id}] is done, its callbacks are not all sent yet")
    wait_for(lambda: stand.arrived(queue), PATIENCE, "what was refused")
    assert result.get(timeout=PATIENCE) == "a"
    stand.takes_effect(*(f"{key}/{each}" for each in "abcd"))


def test_a_follower_that_can_never_be_sent_ends_the_task_as_a_failure_that_is_told(stand):
    """Nobody knows its serializer: the record stays what it is, and nothing circles."""
    key = stand.label()
    first = stand.step(f"{key}/a")
    first.link(stand.step(f"{key}/b", serializer="no such thing"))
    first.link_error(stand.mourn(f"{key}/c"))
    result = first.apply_async()
    with pytest.raises(Exception, match="no such thing"):
        result.get(timeout=PATIENCE)
    stand.takes_effect(f"{key}/a", f"{key}/c")
    record = stand.find("step", result.id)
    assert (record.state, record.delivered) == (State.COMPLETED, False)
    stand.says(f"[{result.id}] is done, but its callbacks cannot be sent")
    assert f"[{result.id}] is done, its callbacks are not all sent yet" not in stand.lead.log


def test_a_follower_that_is_refused_for_too_long_ends_the_task_as_a_failure_that_is_told(stand):
    """The message comes back while its record surely answers it: for half of the retention, which is short here."""
    key = stand.label()
    with stand.refused() as queue:
        follower = stand.step(f"{key}/b", queue=queue)
        first = chain(stand.step(f"{key}/a", name="brief"), follower).apply_async().parent
        wait_for(lambda: first.state == "FAILURE", PATIENCE, lambda: first.state)
    stand.says(f"[{first.id}] is done, its callbacks are not all sent yet")
    stand.says(f"[{first.id}] is done, but its callbacks cannot be sent")
    assert stand.effects(key) == {f"{key}/a": 1}
