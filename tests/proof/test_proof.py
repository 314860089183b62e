"""A minute of ``make proof``: the first worlds of each scope, most of their transitions on each store, some races."""

from __future__ import annotations

import pytest

from tests.proof.model import SCOPES, Scope, explored
from tests.proof.races import race
from tests.proof.replay import SMALL, graph_for, shape
from tests.proof.traces import STORES, opened, walk

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.name)
def test_no_promise_is_broken_in_the_first_worlds(scope: Scope) -> None:
    found = explored(scope, SMALL)
    assert not found.broken, "\n".join([found.broken, *found.way])
    assert found.worlds >= SMALL


@pytest.mark.parametrize("store", STORES)
def test_a_store_answers_as_the_table_does(store: str) -> None:
    with opened(store) as stand:
        walked = walk(graph_for(store, SMALL), stand, kind=shape)
    assert not walked.broken
    assert walked.taken > 0.95 * walked.of


@pytest.mark.parametrize("store", ["redis", "sqlite", "postgresql", "mariadb"])
def test_two_clients_and_a_lost_answer_come_out_as_one_after_the_other(store: str) -> None:
    with opened(store) as stand:
        raced = race(graph_for(store, SMALL), stand, seconds=5)
    assert not raced.broken
    assert raced.runs > 10
