"""The site with its records in PostgreSQL, behind a cache and alone: the important rows of the table.

The rows are those of test_ietf.py, word for word; here they meet the stores that it does not run on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.banks import Bank, open_bank
from tests.http.sites import Site
from tests.http.test_ietf import (  # noqa: F401  collected here, with the sites of this module
    test_of_fifty_simultaneous_posts_one_is_queued_and_all_are_202,
    test_of_fifty_simultaneous_posts_one_pays_and_the_others_are_409_or_replays,
    test_the_first_post_is_202_with_its_status_and_the_last_one_200_with_the_result,
    test_the_same_key_of_somebody_else_is_another_key,
    test_while_a_view_works_the_second_request_is_409_and_then_a_replay_byte_for_byte,
    test_while_no_worker_works_it_is_202_and_the_status_says_queued,
)


@pytest.fixture(scope="module", params=["hybrid", pytest.param("sql", marks=pytest.mark.wide)])
def bank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bank]:
    hybrid = request.param == "hybrid"
    with open_bank(tmp_path_factory.mktemp("bank"), hybrid=hybrid) as bank:
        yield bank


@pytest.fixture
def site(bank: Bank) -> Iterator[Site]:
    """What the rows of the table call it."""
    yield bank
    bank.mood(None)
