"""A person who pays: presses twice, goes back, loses the connection, and has paid once. Counted in the bank's books."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("django")
pytest.importorskip("playwright")

from playwright.sync_api import expect

from tests.browser.conftest import look_at
from tests.http.sites import Site
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

OpenAs = Callable[..., "Page"]

#: A payment takes a worker; CI's are slow.
PAID_MS = 30_000


@pytest.fixture(scope="module")
def address(site: Site) -> str:
    return f"http://127.0.0.1:{site.web.port}"


@pytest.fixture(autouse=True)
def bank(site: Site) -> Iterator[None]:
    """The bank in its usual mood."""
    site.mood(None)
    yield
    site.mood(None)


def key_of(page: Page) -> str:
    return page.get_by_label("Idempotency key").input_value()


def press(page: Page) -> None:
    page.get_by_role("button", name="Pay", exact=True).click()


def answers(page: Page) -> Locator:
    """The rows of the answers, without the one that says that there are none."""
    return page.locator("#answers tr:not(#none)")


def expect_answer(page: Page, number: int, answer: str, *, repeated: str) -> None:
    cells = answers(page).nth(number - 1).get_by_role("cell")
    expect(cells.nth(1)).to_contain_text(answer)
    expect(cells.nth(2)).to_have_text(repeated)


def expect_accepted_twice(page: Page) -> None:
    """Both presses were accepted, as one: whichever came first is the payment, and the other repeats it."""
    expect(answers(page)).to_contain_text(["202", "202"])
    repeated = answers(page).locator("td:nth-child(3)").all_inner_texts()
    assert sorted(repeated) == ["no", "yes"]


def expect_paid(page: Page, site: Site, times: int = 1, *, user: str = "alice") -> None:
    """The page says so, and the books do."""
    expect(page.locator("#count")).to_have_text(str(times), timeout=PAID_MS)
    assert site.payments(key_of(page), user) == times


# Twice ----------------------------------------------------------------------------------------------------------------


def test_a_double_click_pays_once(open_as: OpenAs, site: Site) -> None:
    page = open_as("alice", "/pay/")
    with site.bank("closed"):
        page.get_by_role("button", name="Pay", exact=True).dblclick()
        expect_accepted_twice(page)
        expect(page.locator("#state")).to_have_text("PROCESSING", timeout=PAID_MS)
        expect(page.locator("#count")).to_have_text("0")
    expect_paid(page, site)
    expect(page.locator("#state")).to_have_text("COMPLETED")
    press(page)
    expect_answer(page, 3, "200 COMPLETED", repeated="yes")
    expect_paid(page, site)


# Every page -----------------------------------------------------------------------------------------------------------


def test_each_page_is_accessible_and_fits_light_and_dark_wide_and_narrow(
    open_as: OpenAs, site: Site
) -> None:
    page = open_as("alice", "/pay/")
    look_at(page, "pay, nothing yet")
    page.get_by_label("Recipient").fill("acct_closed")
    page.get_by_role("button", name="Pay", exact=True).dblclick()
    expect(page.locator("#state")).to_contain_text("FAILED", timeout=PAID_MS)
    page.get_by_label("Amount").fill("250")
    page.get_by_role("button", name="Pay", exact=True).click()
    expect(page.locator("#answers")).to_contain_text("422")
    expect(page.locator("#count")).to_have_text("0")
    look_at(page, "pay, with answers")

    page = open_as(None, "/login/")
    look_at(page, "login")
    page.get_by_label("Name").fill("alice")
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    look_at(page, "login, refused")

    page.goto("/")
    look_at(page, "start")
    delivery = str(uuid.uuid4())
    for _ in range(2):
        site.ask(
            *("POST", "/webhooks/github/", {"action": "opened"}),
            user=None,
            X_GitHub_Event="pull_request_review_comment",
            X_GitHub_Delivery=delivery,
        )
    wait_for(lambda: b"too many" in site.ask("GET", "/", user=None).body, 30, "the deliveries")
    page.reload()
    expect(page.get_by_role("region", name="IdempotentTask")).to_be_visible()
    look_at(page, "start, with a ledger")
