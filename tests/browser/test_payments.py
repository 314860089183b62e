"""A person who pays: presses twice, goes back, loses the connection, and has paid once. Counted in the bank's books."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("django")
pytest.importorskip("playwright")

from playwright.sync_api import expect

from tests.browser.conftest import log_in, look_at
from tests.http.sites import ORDER, Site, Web
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


@pytest.fixture
def twin(site: Site) -> Iterator[str]:
    """The address of the same site, whose payments are FastAPI's."""
    command = [sys.executable, "-m", "testproject.web", "0"]
    web = Web(command, site.directory, {**site.env, "APP": "fastapi"}, "twin").start()
    yield f"http://127.0.0.1:{web.port}"
    web.kill()


def test_two_tabs_of_two_frameworks_pay_once(open_as: OpenAs, site: Site, twin: str) -> None:
    page = open_as("alice", "/pay/")
    page.get_by_label("Amount").fill("4217")
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="second tab").click()
    tab = opened.value
    expect(tab.get_by_label("Amount")).to_have_value("4217")
    tab.goto(f"{twin}{tab.url[tab.url.index('/pay/') :]}")
    assert key_of(tab) == key_of(page)
    with site.bank("closed"):
        press(page)
        expect_answer(page, 1, "202", repeated="no")
        tab.get_by_role("button", name="Pay", exact=True).dblclick()
        expect(answers(tab)).to_contain_text(["202", "202"])
    expect_paid(page, site)
    expect_paid(tab, site)
    for each in (page, tab):
        expect(each.locator("#state")).to_have_text("COMPLETED")
        press(each)
    expect_answer(page, 2, "200 COMPLETED", repeated="yes")
    expect_answer(tab, 3, "200 COMPLETED", repeated="yes")
    tab.get_by_label("Amount").fill("5")
    press(tab)
    expect_answer(tab, 4, "422 The key was used for another request", repeated="no")
    expect_paid(tab, site)
    forged = tab.request.post(f"{twin}/payments/", data=ORDER, headers={"Idempotency-Key": "k"})
    assert (forged.status, forged.json()["code"]) == (403, "permission_denied"), "no CSRF token"


def test_the_way_back_and_a_reload_keep_the_payment(open_as: OpenAs, site: Site) -> None:
    page = open_as("alice", "/pay/")
    key = key_of(page)
    page.get_by_label("Recipient").fill("acct_2")
    press(page)
    expect_paid(page, site)
    page.get_by_role("link", name="Status").click()
    expect(page.locator("body")).to_contain_text('"COMPLETED"')
    for again in (page.go_back, page.reload):
        again()
        assert key_of(page) == key
        expect(page.get_by_label("Recipient")).to_have_value("acct_2")
        press(page)
        expect_answer(page, 1, "200 COMPLETED", repeated="yes")
        expect_paid(page, site)


# Trouble --------------------------------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_for_again(
    open_as: OpenAs, site: Site, complaints: list[str]
) -> None:
    page = open_as("alice", "/pay/")

    def lose(route: Any) -> None:
        if route.request.method == "POST":
            assert route.fetch().status == 202
            route.abort()
        else:
            route.continue_()

    page.route("**/payments/", lose)
    press(page)
    expect(page.get_by_role("alert")).to_contain_text("Press again")
    expect(answers(page)).to_contain_text(["No answer"])
    page.unroute("**/payments/")
    press(page)
    expect_answer(page, 2, "20", repeated="yes")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect_paid(page, site)
    assert [each for each in complaints if "net::ERR_FAILED" not in each] == []
    complaints.clear()


# Who pays -------------------------------------------------------------------------------------------------------------


def test_nobody_pays_in_the_name_of_who_logged_in_elsewhere(open_as: OpenAs, site: Site) -> None:
    page = open_as("alice", "/pay/", anew=True)
    elsewhere = page.context.new_page()
    elsewhere.goto("/pay/")
    elsewhere.get_by_role("button", name="Log out").click()
    elsewhere.wait_for_url(re.compile(r"/$"))
    log_in(elsewhere, "bob")
    press(page)
    expect_answer(page, 1, "403", repeated="no")
    assert site.payments(key_of(page), "alice") == site.payments(key_of(page), "bob") == 0


# By keyboard ----------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(open_as: OpenAs, site: Site) -> None:
    page = open_as("alice", "/pay/")
    focused = (
        "() => { const e = document.activeElement, style = getComputedStyle(e);"
        " return [(e.labels?.[0] ?? e).innerText || e.getAttribute('aria-labelledby') || '',"
        " style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2]; }"
    )
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(focused)
        order.append(name.strip().splitlines()[0])
        assert ring, f"{name} has the focus, and nothing shows it"
    assert order == [
        *("Webhook ledger", "Pay once", "Admin", "Log out"),
        *("Amount in cents", "Currency", "Recipient", "Idempotency key"),
        *("Pay", "New key", "Open the same payment in a second tab"),
        "Press\tAnswer\tRepeated\tNow",  # the table, which scrolls when it has to
    ]
    key = key_of(page)
    for _ in range(2):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # New key
    assert key_of(page) != key
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    page.keyboard.press("Space")
    expect(answers(page)).to_have_count(2)
    page.get_by_label("Recipient").focus()
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(3)
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
