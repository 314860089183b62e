"""What people see of an operation, live and without JavaScript; and every page of the site, looked at by a machine."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("django")
pytest.importorskip("playwright")

from playwright.sync_api import expect

from tests.browser.conftest import log_in, look_at
from tests.http.sites import ORDER, Site, new_key
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenAs = Callable[..., "Page"]

#: A payment takes a worker; CI's are slow.
PAID_MS = 30_000

TASK = "testproject.payments.tasks.pay"


@pytest.fixture(scope="module")
def address(site: Site) -> str:
    return f"http://127.0.0.1:{site.web.port}"


#: What the page of a failure says, and what it advises.
FAILURES = {
    "failed": (
        "The account acct_closed is closed. PaymentRefused",
        "not tried again with this key",
    ),
    "retryable": ("The operation failed. BankUnreachable", "tries anew"),
}


@contextlib.contextmanager
def payment(site: Site, state: str) -> Iterator[str]:
    """Give the address of the status of a payment of alice's, in a state that it stays in."""
    recipients = {"failed": "acct_closed", "retryable": "acct_unreachable"}
    order = {**ORDER, "recipient": recipients.get(state, "acct_1")}
    with contextlib.ExitStack() as undo:
        if state == "queued":
            site.worker.freeze()
            undo.callback(site.worker.thaw)
        elif state == "processing":
            undo.enter_context(site.bank("closed"))
        answer = site.pay(order, key=new_key())
        assert answer.status == 202
        if state == "processing":
            wait_for(lambda: site.status(answer).json["state"] == "PROCESSING", 30, "a worker")
        elif state != "queued":
            site.settled(answer)
        yield answer.headers["Location"]


def headings(page: Page, path: str) -> Any:
    page.goto(path)
    return expect(page.get_by_role("heading", level=1))


# What is told, and to whom --------------------------------------------------------------------------------------------


def test_the_page_follows_the_operation_by_itself(open_as: OpenAs, site: Site) -> None:
    with payment(site, "queued") as path, site.bank("closed"):
        page = open_as("alice", path)
        expect(page.get_by_role("heading", level=1)).to_have_text("Waiting for its turn")
        page.evaluate("document.body.dataset.loaded = 'once'")
        site.worker.thaw()
        expect(page.get_by_role("heading", level=1)).to_have_text("In progress", timeout=PAID_MS)
        expect(page).to_have_title(re.compile("^Processing: "))
    expect(page.get_by_role("heading", level=1)).to_have_text("Done", timeout=PAID_MS)
    expect(page.get_by_role("region", name="Result")).to_contain_text('"amount": 100')
    assert page.evaluate("document.body.dataset.loaded") == "once", "it was loaded again"
    # Nothing is asked any more.
    assert page.locator("#status").get_attribute("data-settled") == "yes"


def test_without_javascript_the_page_is_loaded_again_until_it_is_done(
    open_as: OpenAs, site: Site
) -> None:
    with payment(site, "processing") as path:
        page = open_as("alice", path, java_script_enabled=False)
        expect(page.get_by_role("heading", level=1)).to_have_text("In progress")
        expect(page.locator("noscript meta, meta[http-equiv=refresh]")).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_text("Done", timeout=PAID_MS)
    expect(page.locator("meta[http-equiv=refresh]")).to_have_count(0)


def expect_failure(page: Page, told: str, advice: str) -> None:
    """A failure says what may be known of it."""
    expect(page.get_by_role("heading", level=1)).to_have_text("Failed")
    expect(page.get_by_role("definition").first).to_have_text(told)
    expect(page.get_by_role("status")).to_contain_text(advice)
    assert "no route to" not in page.content()


@pytest.mark.wide  # tests/http/test_people.py and test_views.py
def test_it_is_shown_to_its_caller_alone(open_as: OpenAs, site: Site) -> None:
    with payment(site, "completed") as path:
        headings(open_as("alice", path), path).to_have_text("Done")
        bobs = open_as("bob", "/pay/")
        answer = bobs.goto(path)
        assert answer is not None
        assert answer.status == 404
        expect(bobs.get_by_role("heading", level=1)).to_have_text("There is no such key")
        nobody = open_as(None, path)
        expect(nobody.get_by_role("heading", level=1)).to_have_text("Log in")
        log_in(nobody, "alice")
        expect(nobody).to_have_url(re.compile(re.escape(path) + "$"))
        expect(nobody.get_by_role("heading", level=1)).to_have_text("Done")


def test_a_log_out_elsewhere_ends_the_watching(open_as: OpenAs, site: Site) -> None:
    with payment(site, "processing") as path:
        page = open_as("alice", path, anew=True)
        elsewhere = page.context.new_page()
        elsewhere.goto("/pay/")
        elsewhere.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("alert")).to_contain_text("not logged in any more")
        page.get_by_role("link", name="Load the page again").click()
        log_in(page, "alice")
        expect(page.get_by_role("heading", level=1)).to_have_text("In progress")


def test_a_server_that_comes_back_is_asked_again(
    open_as: OpenAs, site: Site, complaints: list[str]
) -> None:
    moving = "document.getAnimations().length"
    with payment(site, "processing") as path:
        page = open_as("alice", path)
        assert page.evaluate(moving) == 0, "nothing moves for who wants no motion"
        page.emulate_media(reduced_motion="no-preference")
        assert page.evaluate(moving) == 1
        page.emulate_media(reduced_motion="reduce")
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("This page keeps trying")
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("heading", level=1)).to_have_text("Done", timeout=PAID_MS)
    assert [each for each in complaints if "ERR_INTERNET_DISCONNECTED" not in each] == []
    complaints.clear()


def test_what_an_operator_does_is_seen(open_as: OpenAs, site: Site) -> None:
    with payment(site, "processing") as path:
        page = open_as("alice", path)
        key = path.rpartition("/")[2]
        admin = open_as("admin", f"?task={TASK}&state=PROCESSING")
        admin.get_by_role("link", name=key).click()
        admin.get_by_role("link", name="Release", exact=True).click()
        admin.get_by_label("Release it although its owner is live").check()
        admin.get_by_label("Reason").fill("a test")
        admin.get_by_role("button", name="Yes, release it").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("There is no such key")
        expect(page.get_by_role("alert")).to_have_count(0)


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
    for state in ("queued", "processing", "completed", "failed", "retryable"):
        with payment(site, state) as path:
            page.goto(path)
            look_at(page, state)
            if state in FAILURES:
                expect_failure(page, *FAILURES[state])
    page.goto(f"/idempotency/{TASK}/unknown")
    look_at(page, "unknown key")

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
    expect(page.get_by_role("region", name="Counters per event")).to_be_visible()
    look_at(page, "start, with a ledger")
