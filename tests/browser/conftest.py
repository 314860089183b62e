"""A real Chromium, and the admin that it looks at: a web server in a process of its own, over a Redis."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis

pytest.importorskip("django")
pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect, sync_playwright

from celery_idempotent.stores import Store, open_store
from tests.http.sites import Site, open_site
from tests.support.debian import program
from tests.support.preloaded import spawn
from tests.support.servers import embedded_redis, need, own_prefix
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# CI's machines are slow.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

#: Debian's name for one without windows, which takes less than half of the CPU for the same.
_SHELL = "chromium-headless-shell"

#: Debian's and others' names for a whole one.
_NAMES = ("chromium", "chromium-browser", "google-chrome")

#: No sandbox, because CI is root in a container; and no word to anybody but our server.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


_SIZE: Any = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; CI gets one from its Debian."""
    found = program(_SHELL, package=_SHELL) or program(*_NAMES, package="chromium")
    need(found, "Chromium")
    return str(found)


@pytest.fixture(scope="module")
def store(redis_url: str) -> Iterator[Store]:
    """A store with a prefix of its own, deleted in the end."""
    client = redis.Redis.from_url(redis_url)
    with closing(client), own_prefix(client) as prefix:
        store = open_store(f"{redis_url}?prefix={prefix}")
        yield store
        store.close()


@pytest.fixture(scope="module")
def address(redis_url: str, store: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the admin's server is."""
    directory = tmp_path_factory.mktemp("browser")
    log = directory / "server.log"
    settings = {
        "DATABASE_PATH": directory / "db.sqlite3",
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
    }
    with log.open("wb") as output:
        server = spawn(
            (sys.executable, "-m", "tests.browser.server", f"{redis_url}?prefix={store.prefix}"),
            cwd=directory,
            env=child_environment(settings),
            log=output,
        )

    def said() -> str | None:
        assert server.poll() is None, log.read_text()[-3000:]
        return next((x for x in log.read_text().splitlines() if x.startswith("http://")), None)

    try:
        yield str(wait_for(said, 60, "the address of the server"))
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(10)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A running Chromium. While it runs there is an event loop in this thread: no Django in these tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The whole test project at work, as `make serve` has it: web server and worker, the records in the database."""
    directory = tmp_path_factory.mktemp("site")
    env = {"IDEMPOTENCY_STORE": "django://"}
    with (
        embedded_redis() as redis,
        open_site(directory, redis, settings="tests.browser.site_settings", env=env) as site,
    ):
        yield site


@pytest.fixture(scope="module")
def _pages() -> dict[str, Page]:
    """The page of everybody who has logged in, for all tests of a module: a new one costs half a second of CPU."""
    return {}


@pytest.fixture(scope="module")
def _complaints() -> list[str]:
    return []


@pytest.fixture
def complaints(_complaints: list[str]) -> Iterator[list[str]]:
    """What the browser complained of; what is left in the end fails the test."""
    _complaints.clear()
    yield _complaints
    assert _complaints == []


@pytest.fixture
def open_as(
    browser: Browser, address: str, complaints: list[str], _pages: dict[str, Page]
) -> Iterator[Callable[..., Page]]:
    """A function that gives a page of somebody who has logged in, or of nobody.

    A path is one of the records' admin, or begins with a slash. ``anew``: a page and a login that no other test shares.
    Nothing moves, since each frame has to be drawn, until a test asks for it.
    """
    contexts: list[BrowserContext] = []
    in_use: set[str] = set()

    def new_page(**options: Any) -> Page:
        context = browser.new_context(
            base_url=address, viewport=_SIZE, reduced_motion="reduce", **options
        )
        context.set_default_timeout(PATIENCE_MS)
        context.on("weberror", lambda error: complaints.append(str(error.error)))
        context.on("console", lambda said: _complain(complaints, said))
        return context.new_page()

    def page_of(user: str) -> Page:
        if user not in _pages:
            _pages[user] = new_page()
            log_in(_pages[user], user)
        return _pages[user]

    def open_as(user: str | None, path: str = "", *, anew: bool = False, **options: Any) -> Page:
        if user is None or anew or options or user in in_use:
            if user is not None and not anew:
                options["storage_state"] = page_of(user).context.storage_state()
            page = new_page(**options)
            contexts.append(page.context)
            if user is not None and anew:
                log_in(page, user)
        else:
            page = page_of(user)
            in_use.add(user)
        if not path.startswith("/"):
            path = f"/admin/celery_idempotent/idempotencyrecord/{path}"
        page.goto(path)
        return page

    yield open_as
    said = list(complaints)
    for context in contexts:
        context.close()
    for user in in_use:
        _clear(_pages[user])
    complaints[:] = said  # and not of what it had to break off


def _clear(page: Page) -> None:
    """Leave a page as the next test wants it."""
    for other in page.context.pages:
        if other is not page:
            other.close()
    page.unroute_all()
    page.set_viewport_size(_SIZE)
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    # A page of the same site, which takes no other process as an empty one does.
    page.goto("/static/nothing.html")


#: What a later page shares with the pages before it is not looked at again.
_LOOKS: set[str] = set()


def look_at(page: Page, what: str) -> None:
    """A page is accessible and fits, light and wide, dark and narrow."""
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"{what}: {over} pixels too wide at {width}"
        # Links fade from one scheme's colour into the other's; one that is broken off ends in an error.
        page.evaluate("Promise.allSettled(document.getAnimations().map(each => each.finished))")
        if page.evaluate("typeof axe") == "undefined":
            page.evaluate(AXE_SCRIPT)
        whole = {"runOnly": _OF_WIDTH} if width == 390 else {"rules": _NOT_OF_MARKUP}
        found, looks = page.evaluate(_AXE, [whole, _OF_COLOR, sorted(_LOOKS)])
        assert found == [], (what, scheme, width)
        _LOOKS.update(looks)


#: The rules whose answer is another in another colour, and those in another width; the rest looks at the same markup.
_OF_COLOR = ["color-contrast", "link-in-text-block"]
_OF_WIDTH = ["scrollable-region-focusable", "target-size"]
_NOT_OF_MARKUP = {name: {"enabled": False} for name in _OF_COLOR + _OF_WIDTH}

#: The rules of colour take most of the time: they look at one text of each colour, font and background.
_AXE = """
async ([whole, rules, known]) => {
  const looks = new Set(known), behind = new Map(), texts = [];
  const says = each => [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  for (const each of document.body.querySelectorAll("*")) {
    const style = getComputedStyle(each), box = each.getBoundingClientRect();
    const ground = [style.backgroundColor, style.backgroundImage, style.opacity].join();
    const below = behind.get(each.parentElement) ?? "";
    behind.set(each, ground === "rgba(0, 0, 0, 0),none,1" ? below : below + ground);
    const within = says(each.parentElement) && getComputedStyle(each.parentElement).color;
    const own = [style.color, style.font, style.textDecorationLine];
    const look = [...own, within, behind.get(each)].join();
    if ((says(each) || each.matches("input, select, textarea")) && !looks.has(look) &&
        box.width && box.right > 0 && box.left < innerWidth && each.checkVisibility()) {
      looks.add(look);
      texts.push(each);
    }
  }
  const options = {resultTypes: ["violations"]}, color = {...options, runOnly: rules};
  const found = [await axe.run({...options, ...whole})];
  if (texts.length) found.push(await axe.run({include: texts}, color));
  const told = each => [each.id, each.nodes[0].html];
  return [found.flatMap(each => each.violations.map(told)), [...looks]];
}
"""


def log_in(page: Page, user: str) -> None:
    """Log in, where the page is that asks for it or from the start; everybody's password is their name."""
    if "/login/" not in page.url:
        page.goto("/login/?next=/")
    page.get_by_label("Name").fill(user)
    page.get_by_label("Password").fill(user)
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "/login/" not in url)


def _complain(complaints: list[str], said: Any) -> None:
    # A page that is 404 or 400 on purpose is noted, too.
    if (
        said.type in {"error", "warning"}
        and "the server responded with a status of" not in said.text
    ):
        complaints.append(said.text)
