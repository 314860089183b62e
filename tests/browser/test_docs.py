"""The site of the documentation, built without a warning: each page is accessible, the search finds the right one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs.conf import MOVED
from tests.browser.conftest import PATIENCE_MS, look_at
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("html")
    # As `make docs`: a link that leads nowhere is an error.
    options = ("-q", "--nitpicky", "--fail-on-warning", "--keep-going", "-b", "html")
    command = (sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(output))
    subprocess.run(command, cwd=ROOT, check=True)
    return output


def test_no_link_is_broken_and_no_page_forgotten(built: Path) -> None:
    assert (built / "index.html").exists()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("name", sorted(each.stem for each in (ROOT / "docs").glob("*.md")))
def test_every_page_is_accessible_and_fits(page: Page, built: Path, name: str) -> None:
    page.goto((built / f"{name}.html").as_uri())
    look_at(page, name)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("CORS", "http"),
        ("Stripe", "http"),
        ("visibility timeout", "running"),
        ("ran twice", "operating"),
        ("stuck", "operating"),
        ("rerun", "operating"),
        ("tenant", "recipes"),
        ("acks_late", "running"),
        ("PENDING", "operating"),
    ],
)
def test_the_search_finds_the_page_within_the_first_three(
    page: Page, built: Path, words: str, wanted: str
) -> None:
    page.goto(f"{(built / 'search.html').as_uri()}?q={words}")
    page.locator("#search-results li a").first.wait_for()
    page.get_by_text("Search finished").or_(page.get_by_text("Search Results")).first.wait_for()
    links = page.locator("#search-results > ul > li > a").all()[:3]
    found = [str(link.get_attribute("href")).partition(".html")[0] for link in links]
    assert wanted in found


@pytest.mark.parametrize("name", MOVED)
def test_a_former_address_leads_to_the_new_one(built: Path, name: str) -> None:
    target, _, anchor = MOVED[name].partition("#")
    assert f'"refresh" content="0; url={MOVED[name]}"' in (built / f"{name}.html").read_text()
    assert not anchor or f'id="{anchor}"' in (built / target).read_text()
