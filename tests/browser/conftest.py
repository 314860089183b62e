"""A real Chromium, and the admin that it looks at: a web server in a process of its own, over a Redis."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import redis

pytest.importorskip("django")
pytest.importorskip("playwright")

from playwright.sync_api import sync_playwright

from celery_idempotent.stores import Store, open_store
from tests.support.servers import need
from tests.support.workers import child_environment

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Debian's and others' names for it.
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


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; CI gets one from its Debian."""
    found = _find()
    if not found and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        for words in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
            subprocess.run(("apt-get", "-q", *words), check=False, timeout=600)
        found = _find()
    need(found, "Chromium")
    return str(found)


def _find() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def store(redis_url: str) -> Iterator[Store]:
    """A store with a prefix of its own, deleted in the end."""
    prefix = f"test-{uuid.uuid4().hex}"
    store = open_store(f"{redis_url}?prefix={prefix}")
    yield store
    store.close()
    client = redis.Redis.from_url(redis_url)
    keys = list(client.scan_iter(match=f"{prefix}*", count=1000))
    for start in range(0, len(keys), 500):
        client.delete(*keys[start : start + 500])
    client.close()


@pytest.fixture(scope="module")
def address(redis_url: str, store: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the admin's server is."""
    directory = tmp_path_factory.mktemp("browser")
    log = directory / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            (sys.executable, "-m", "tests.browser.server", f"{redis_url}?prefix={store.prefix}"),
            cwd=directory,
            env=child_environment({"DATABASE_PATH": directory / "db.sqlite3"}),
            stdout=subprocess.PIPE,
            stderr=output,
        )
    assert server.stdout is not None
    try:
        line = server.stdout.readline().decode().strip()
        assert line.startswith("http://"), log.read_text()[-3000:]
        yield line
    finally:
        server.kill()
        server.wait(10)
        server.stdout.close()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A running Chromium. While it runs there is an event loop in this thread: no Django in these tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def _cookies() -> dict[str, Any]:
    return {}


@pytest.fixture
def open_as(
    browser: Browser, address: str, _cookies: dict[str, Any]
) -> Iterator[Callable[..., Page]]:
    """A function that gives a page of somebody who has logged in; complaints of the browser fail the test."""
    contexts, complaints = [], []

    def open_as(user: str, path: str = "", **options: Any) -> Page:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(base_url=address, storage_state=_cookies.get(user), **options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: _complain(complaints, said))
        if user not in _cookies:
            page.goto("/admin/login/")
            page.get_by_label("Username").fill(user)
            page.get_by_label("Password").fill(user)
            page.keyboard.press("Enter")
            page.wait_for_url("**/admin/")
            _cookies[user] = context.storage_state()
        page.goto(f"/admin/celery_idempotent/idempotencyrecord/{path}")
        return page

    yield open_as
    for context in contexts:
        context.close()
    assert complaints == []


def _complain(complaints: list[str], said: Any) -> None:
    # A page that is 404 or 400 on purpose is noted, too.
    if (
        said.type in {"error", "warning"}
        and "the server responded with a status of" not in said.text
    ):
        complaints.append(said.text)
