"""`celery -A proj idempotency web`: the admin of an app without Django, for whoever has its address."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from typing import Any

import httpx
import pytest

from celery_idempotent.records import SettleRequest, State
from celery_idempotent.stores.memory import MemoryStore
from tests.cli.running import run_idempotency
from tests.support.admin import TASK, claim, make_app, value
from tests.support.workers import child_environment

#: Served by a process of its own, with a failed record that can run again.
app = make_app(store := MemoryStore())
_error = value('{"exc_type": "CardDeclined", "exc_message": ["Ada"], "exc_module": "shop"}')
_task: Any = app.tasks[TASK]
_message = _task.idempotency_definition().codec.dump_message(_task.s("o-1"))
_end = SettleRequest(claim(store, "o-1"), State.FAILED, _error, 3_600_000, message=_message)
store.settle(_end)

RECORDS = "/admin/celery_idempotent/idempotencyrecord/"
OPERATION = f"{RECORDS}operation/?one=1"


@contextlib.contextmanager
def served(*words: str) -> Iterator[tuple[httpx.Client, str]]:
    """Serve the pages, and end them as Ctrl+C does; yield a browser, and the address that is told."""
    line = ["-m", "celery", "-A", __name__, "idempotency", "web", "--port", "0", *words]
    how: dict[str, Any] = {"env": child_environment(), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *line], **how) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        base = address.partition("?")[0]
        try:
            with httpx.Client(base_url=base, follow_redirects=True, timeout=20) as browser:
                yield browser, address
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.fixture(scope="module")
def read_only() -> Iterator[tuple[httpx.Client, str]]:
    with served() as pages:
        yield pages


def record_of(browser: httpx.Client) -> str:
    """The page of the record."""
    (link,) = set(re.findall(rf'href="({RECORDS}[^"]*/change/)"', browser.get(RECORDS).text))
    page = browser.get(link).text
    assert "o-1 of shop.charge is FAILED" in page
    return page


def form_of(page: str, **more: str) -> dict[str, str]:
    """The CSRF token of a page, and the mark of its record."""
    found = re.findall(r'name="(csrfmiddlewaretoken|record)" value="(.*?)"(?: |>)', page)
    return {**{name: unescape(each) for name, each in found}, **more}


def test_the_address_opens_the_pages_to_read_and_nothing_else_does(read_only) -> None:
    browser, address = read_only
    assert [browser.get(each).status_code for each in ("/", "/?token=guessed")] == [403, 403]
    assert browser.get(address, headers={"Host": "evil.example"}).status_code == 400
    opened = browser.get(address)
    assert (opened.status_code, "token" in str(opened.url)) == (200, False)
    cookie = opened.history[0].headers["Set-Cookie"]
    assert re.fullmatch(r"\s*celery_idempotent=\S+; HttpOnly; Path=/; SameSite=Strict", cookie)
    assert "default-src 'self'" in opened.headers["Content-Security-Policy"]
    page = record_of(browser)
    assert "Ada" not in page
    assert 'name="operation"' not in page
    mark = '1 FAILED ["shop.charge","","o-1"]'
    forged = form_of(page, operation="forget", confirmed="1", record=mark)
    assert browser.post(OPERATION, data=forged).status_code == 403
    record_of(browser)


def test_operations_and_results_are_allowed_at_the_start() -> None:
    with served("--allow-operations", "--allow-results", "--who", "alice") as (browser, address):
        browser.get(address)
        page = record_of(browser)
        assert "CardDeclined: Ada" in page
        form = form_of(page, operation="requeue", confirmed="1", reason="new card")
        unprotected = {**form, "csrfmiddlewaretoken": ""}
        assert browser.post(OPERATION, data=unprotected).status_code == 403
        page = browser.post(OPERATION, data=form).text
        assert "o-1 of shop.charge is QUEUED" in page
        assert "requeue by alice: new card" in page


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        ("", {"DJANGO_SETTINGS_MODULE": "testproject.settings"}, "use its admin"),
        ("--port {0.port}", {}, "Address already in use. Choose another --port."),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(read_only, words, env, why) -> None:
    browser, _ = read_only
    ran = run_idempotency(__name__, env, "web", *words.format(browser.base_url).split())
    assert ran.code == 2
    assert why in ran.text.splitlines()[-1]
