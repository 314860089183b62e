"""The admin in a real browser: every filter and operation, three users, the keyboard alone, accessibility."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("django")
pytest.importorskip("playwright")

from playwright.sync_api import expect

from celery_idempotent.records import State
from celery_idempotent.stores import Store
from tests.browser.conftest import look_at
from tests.support.admin import TASK, claim, fill, identity, settle

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

OpenAs = Callable[..., "Page"]


@pytest.fixture(scope="module", autouse=True)
def records(store: Any) -> None:
    """One of each kind, with names that no other test uses."""
    fill(store)
    store.count({(TASK, "claimed"): 5, (TASK, "replayed"): 3, (TASK, "conflicted"): 2})


def show(page: Page, key: str, *, task: str = TASK) -> None:
    """Go where a search for a key leads, and follow the link to its record."""
    page.goto(f"/admin/celery_idempotent/idempotencyrecord/records/?task={task}&key={key}")
    page.get_by_role("link", name=key, exact=True).first.click()
    expect(page.get_by_role("heading", name=key, exact=True)).to_be_visible()


def rows(page: Page) -> Locator:
    """The links of the list to its records; after a click, wait for as many as there shall be."""
    return page.get_by_role("region", name="Records").locator("tbody th a")


def listed(page: Page) -> set[str]:
    """The keys in the list."""
    return set(rows(page).all_inner_texts())


def test_several_records_are_operated_on_after_one_question(open_as: OpenAs, store: Store) -> None:
    scope = uuid.uuid4().hex
    about = {key: identity(key, scope=scope) for key in ("lost", "hangs", "moves", "paid")}
    for key in ("lost", "moves"):
        claim(store, about[key], lease_ms=1)
    claim(store, about["hangs"])
    settle(store, claim(store, about["paid"]))
    page = open_as("operator", f"records/?scope={scope}")

    def go(**chosen: bool) -> None:
        """Tick the box in the head and, of the others, what is named; then Go."""
        page.get_by_label("Select all on this page").check()
        for key, ticked in chosen.items():
            page.get_by_label(re.compile(rf"^Select .*\b{key}\b")).set_checked(ticked)
        page.get_by_label("Action:").select_option(label="Release selected records")
        page.get_by_role("button", name="Go").click()

    expect(page.get_by_role("checkbox", name=re.compile("^Select "))).to_have_count(5)
    go(paid=False)
    doing = page.get_by_role("region", name="What will be done")
    expect(doing.get_by_role("row")).to_have_count(4)
    expect(page.get_by_text("Release 2 records? 1 more only if you force it.")).to_be_visible()
    page.get_by_role("link", name="No, take me back").click()
    expect(rows(page)).to_have_count(len(about))
    assert listed(page) == set(about)
    go()
    expect(doing.get_by_role("row", name=re.compile("^lost"))).to_contain_text("Will be released.")
    expect(doing.get_by_role("row", name=re.compile("^paid"))).to_contain_text("Left alone: only")
    claim(store, about["moves"], lease_ms=1)
    page.get_by_label("Also if the owner is live").check()
    page.locator("form.idem-operation").evaluate("form => form.noValidate = true")
    page.get_by_role("button", name="Yes, release them").click()
    expect(page.get_by_role("alert")).to_contain_text("Please correct")
    expect(page.get_by_text("To force it, say why.")).to_be_visible()
    page.get_by_label("Reason").fill("its host is gone")
    page.get_by_role("button", name="Yes, release them").click()
    expect(page.locator(".messagelist")).to_contain_text("Released: 2 of 2.")
    assert {key for key in about if store.get(about[key])} == {"moves", "paid"}
    expect(rows(page)).to_have_count(2)
    assert listed(page) == {"moves", "paid"}


def test_the_keyboard_is_enough(open_as: OpenAs, store: Store) -> None:
    key = f"typed-{uuid.uuid4().hex}"
    claim(store, key, lease_ms=1)
    page = open_as("operator", "records/")

    def go_to(name: str) -> None:
        """Press Tab until something of that name has the focus, and a ring that shows it."""
        for _ in range(80):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => { const e = document.activeElement;"
                " return (e.labels?.[0] ?? e).innerText || e.value || '' }"
            )
            if focused.strip().rstrip(":").lower() == name.lower():
                break
        else:
            pytest.fail(f"Tab does not come to {name}")
        assert page.evaluate("document.activeElement.matches(':focus-visible')")

    go_to("Task")
    page.keyboard.type(TASK)
    go_to("Key, or task id")
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    page.wait_for_url("**key=typed**")
    go_to(key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/")
    go_to("Release")
    page.keyboard.press("Enter")
    page.wait_for_url("**/operation/?one=1")
    go_to("Reason")
    page.keyboard.type("by keyboard")
    go_to("Yes, release it")
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/")
    expect(page.locator(".messagelist")).to_contain_text("Released")
    assert store.get(identity(key)) is None


def test_the_first_page_has_totals_and_charts_with_their_sums_without_javascript(
    open_as: OpenAs,
) -> None:
    page = open_as("viewer", java_script_enabled=False)
    chart = page.get_by_role(
        "img",
        name=re.compile("^All tasks: runs 5, releases .+, failures .+, replays 3, conflicts 2"),
    )
    expect(chart).to_be_visible()
    expect(page.get_by_text("Refresh every 5 s")).to_be_hidden()
    page.get_by_role("link", name=re.compile("failed$")).first.click()
    expect(rows(page).filter(has_text=re.compile("^failed$"))).to_have_count(1)


def test_the_first_page_refreshes_itself_unless_somebody_is_in_it(
    open_as: OpenAs, store: Store
) -> None:
    key = f"new-{uuid.uuid4().hex}"
    page = open_as("operator")
    settle(store, claim(store, key), State.FAILED, error="ValueError: new")
    expect(page.get_by_role("link", name=key)).to_be_visible()
    expect(page.locator("#idem-when")).to_contain_text("As of")
    store.forget(identity(key))
    page.get_by_role("link", name=key).focus()
    page.route("**/idempotencyrecord/", lambda route: route.fulfill(status=503))
    page.get_by_label("Refresh every 5 s").focus()
    expect(page.locator("#idem-when")).to_have_text("Not refreshed: the store does not answer.")
    expect(page.get_by_role("link", name=key)).to_be_visible()
    page.unroute_all()
    expect(page.get_by_role("link", name=key)).to_have_count(0)


def test_each_page_is_accessible_and_fits_light_and_dark_wide_and_narrow(open_as: OpenAs) -> None:
    page = open_as("operator", "records/?state=FAILED")
    records = page.url.partition("?")[0]
    look_at(page, "list")
    for where in ("?since=x&cursor=x", "../", "../?hours=24"):
        page.goto(records + where)
        look_at(page, where)
    for key in ("done", "failed", "live"):
        show(page, key)
        look_at(page, key)
    live = page.url
    # Of all questions the one with the most fields.
    page.get_by_role("button", name="Complete").click()
    expect(page.get_by_label("Value, in JSON")).to_be_visible()
    look_at(page, "complete")
    page.goto(live.replace("live", "nothing"))
    look_at(page, "gone")
    page.goto(f"{records}?state=PROCESSING")
    page.get_by_label(re.compile("^Select .* key live$")).check()
    page.get_by_label("Action:").select_option(label="Release selected records")
    page.get_by_role("button", name="Go").click()
    expect(page.get_by_role("button", name="Yes, release it")).to_be_visible()
    look_at(page, "an operation that has to be forced")
