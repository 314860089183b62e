"""The status resource for people, where Django REST framework has no part in it: refusals as pages, and the login."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sql.databases import ready
from tests.support.admin import make_app

#: Its store is out of reach.
app = make_app("redis://127.0.0.1:1/0")

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module", autouse=True)
def _django(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ready(tmp_path_factory.mktemp("people")):
        yield


def ask(*, user: Any = None, accept: str = BROWSER, **settings: Any) -> Any:
    """Ask for a status."""
    from django.contrib.auth.models import AnonymousUser
    from django.test import RequestFactory, override_settings

    from celery_idempotent.django.http.status import status

    request = RequestFactory().get("/idempotency/shop.charge/k", {"a": "b c"}, HTTP_ACCEPT=accept)
    request.user = user or AnonymousUser()
    options = {"app": f"{__name__}.app", **settings.pop("IDEMPOTENCY_HTTP", {})}
    with override_settings(IDEMPOTENCY_HTTP=options, **settings):
        return status(request, "shop.charge", "k")


def test_a_person_without_a_login_is_led_to_it_and_back() -> None:
    answer = ask()
    assert answer.status_code == 302
    assert answer["Location"] == "/login/?next=/idempotency/shop.charge/k%3Fa%3Db%2Bc"
    assert answer["Cache-Control"] == "no-store"
    for name in ("Accept", "Cookie"):
        assert name in answer["Vary"]


@pytest.mark.parametrize(
    ("address", "leads"),
    [
        ("https://sso.example/in?app=shop", "https://sso.example/in?app=shop&next=/idempotency/"),
        ("login", "/login/?next=/idempotency/"),
        ("/no/such/page/", None),
        ("no-such-name", None),
    ],
)
def test_only_a_login_that_there_is_is_led_to(address: str, leads: str | None) -> None:
    answer = ask(LOGIN_URL=address)
    if leads:
        assert answer["Location"].startswith(leads)
    else:
        assert answer.status_code == 403
        assert answer["Content-Type"].startswith("text/html")
        assert b"Log in, or send credentials." in answer.content


def test_a_login_does_not_help_where_the_project_knows_its_callers_otherwise() -> None:
    answer = ask(IDEMPOTENCY_HTTP={"scope": lambda _request: None})
    assert answer.status_code == 403
    assert b"does not say who sends it" in answer.content


def test_a_refusal_is_a_page_with_the_status_and_headers_of_the_problem() -> None:
    from django.contrib.auth.models import User

    answer = ask(user=User(pk=5))
    assert answer.status_code == 503
    assert answer["Content-Type"].startswith("text/html")
    assert answer["Cache-Control"] == "no-store"
    assert int(answer["Retry-After"]) >= 1
    assert b"Ask again later." in answer.content
    assert b"Try again" in answer.content


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/json, text/html"])
def test_a_program_gets_problems(accept: str) -> None:
    answer = ask(accept=accept)
    assert answer.status_code == 403
    assert answer["Content-Type"] == "application/problem+json"
