"""The parts of the HTTP side, each by itself."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpResponse
from django.test import override_settings
from django.test.utils import isolate_apps
from django.views import View

from celery_idempotent.django import user_scope
from celery_idempotent.django.http import idempotent_view, keyed_view
from celery_idempotent.django.http.requests import (
    caller_scope,
    http_options,
    session_scope,
)
from celery_idempotent.django.http.responses import parts_of, response_of
from celery_idempotent.django.http.views import _Call
from celery_idempotent.errors import InvalidKey, InvalidOption, ResultUnavailable
from celery_idempotent.http.answers import RequestRefused, ResponseCodec, read_response
from celery_idempotent.http.guard import Guard
from celery_idempotent.http.requests import http_identity, read_key
from celery_idempotent.records import Stored
from celery_idempotent.stores import open_store

pytestmark = pytest.mark.usefixtures("django")


def view(_request: Any) -> None:
    """A view."""


# Options -------------------------------------------------------------------------------------------------------------


def test_the_setting_is_read_and_the_view_wins() -> None:
    with override_settings(IDEMPOTENCY_HTTP={"lease": 7, "required": False}):
        assert (http_options().lease_ms, http_options({"lease": 9}).lease_ms) == (7000, 9000)
        assert http_options({"lease": 9}).required is False
    for wrong in ({"leese": 1}, "lease", {"lease": None}):
        with override_settings(IDEMPOTENCY_HTTP=wrong), pytest.raises(InvalidOption):
            http_options()


def test_a_class_is_refused_with_what_to_decorate_instead() -> None:
    from rest_framework.decorators import api_view
    from rest_framework.response import Response
    from rest_framework.views import APIView

    for decorator in (idempotent_view, keyed_view):
        for made in (View, api_view(["POST"])(lambda _: Response()), APIView.as_view()):
            with pytest.raises(InvalidOption, match="decorate its handler"):
                decorator(made)


# Keys ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("abc", "abc"),
        ('"abc"', "abc"),
        (' "abc"  ', "abc"),
        (r'"a\"b\\c"', r'a"b\c'),
        ('"a b"', "a b"),
        ('"a";x', "a"),
        (r'"a";x=1; y="z;\"";z=?1;t=tok/en;b=:YQ==:', "a"),
        ('"a";g=@1659578233;h=@-1', "a"),
        (r'"a";g=%"This is f\u%c3%bcr"; h=%"";i=1', "a"),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("a:b/c?d=e&f", "a:b/c?d=e&f"),
        ("k" * 255, "k" * 255),
        ("1" * 253, "1" * 253),
    ],
)
def test_a_key_is_a_string_of_rfc_9651_or_bare(factory: Any, value: str, key: str) -> None:
    assert read_key(value) == key
    assert read_key(None) is None


REFUSED: list[tuple[str, str]] = [
    *((each, "") for each in ('"a" ;x', '"a";X=1', '"a";=1', '"a";x="b,c"', "a\tb", "\x7f", "é")),
    *((each, "") for each in ('"a\nb"', "(a)b,c")),
    *((each, "It is empty") for each in ("", "  ", '""', '"";x=1')),
    ("k" * 256, "It has 256 characters, and 255 are allowed."),
    ("1" * 254, "It has 256 characters as JSON, and 255 are allowed."),
    (f'"[{"k" * 300}"', "It has 303 characters as JSON, and 255"),
    (f'"{"k" * 1023}"', "It has more than 1024 characters."),
    ("a,b", "It is neither"),
    ('"é"', "It is neither"),
    ("a b", "nor one bare value"),
]


@pytest.mark.parametrize(("value", "told"), REFUSED, ids=[each[:12] for each, _ in REFUSED])
def test_whatever_else_is_refused_and_told_why(factory: Any, value: str, told: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_key(value)
    assert refused.value.code == "idempotency_key_invalid"
    assert told in str(refused.value)


# Fingerprints --------------------------------------------------------------------------------------------------------


def fingerprint(request: Any, **options: Any) -> bytes:
    guard = Guard("v", view, http_options(options), lambda: open_store("memory://"))
    return _Call(guard, view, (request,), {}).fingerprint_of_request()


def test_a_body_stays_readable_for_the_view(factory: Any) -> None:
    upload = {"field": "x", "file": SimpleUploadedFile("a.txt", b"content")}
    request = factory.post("/", upload)
    fingerprint(request)
    assert request.POST["field"] == "x"
    assert request.FILES["file"].read() == b"content"
    request = factory.put("/", b"raw", content_type="text/plain")
    fingerprint(request)
    assert request.body == b"raw"


# Kept responses ------------------------------------------------------------------------------------------------------


def packed(made: HttpResponse, max_bytes: int = 1000) -> Stored:
    return ResponseCodec("v", max_bytes).pack(parts_of(made))


def kept_again(made: HttpResponse) -> HttpResponse:
    """Return a response as a repetition gets it."""
    return response_of(read_response(packed(made)))


@pytest.mark.parametrize("status", [200, 204, 404])
@pytest.mark.parametrize("body", [b"", b"text", bytes(range(256)), b"\r\n\r\n"])
def test_a_kept_response_is_the_same_bytes(status: int, body: bytes) -> None:
    headers = {
        "Content-Type": "x/y; charset=é",
        "Location": "/a?b=c: d",
        "Content-Encoding": "gzip",
        "Retry-After": "120",
        "X-Own": "1",
        "Access-Control-Allow-Origin": "https://shop.example",
    }
    for_one_answer = {
        "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
        "Connection": "close",
        "WWW-Authenticate": "Basic",
        "traceparent": "00-1-2-01",
        "Idempotent-Body-Not-Kept": "a view's own",
    }
    made = HttpResponse(body, status=status, reason="All Is Well", headers=headers | for_one_answer)
    made.set_cookie("session", "of the first caller")
    again = kept_again(made)
    assert (again.status_code, again.content, again.reason_phrase) == (status, body, "All Is Well")
    assert dict(again.headers) == {**headers, "Idempotent-Replayed": "true"}
    assert not again.cookies
    kept = packed(HttpResponse(headers={"Set-Cookie": "sid=1", "Age": "of one"})).body
    assert (b"sid" in kept, b"of one" in kept) == (False, False), "a record has none of them"


def test_a_value_that_is_no_response_is_not_read_as_one() -> None:
    import dataclasses

    kept = packed(HttpResponse("text"))
    assert read_response(kept).body == b"text"
    for no_response in (
        Stored(content_type="application/json", content_encoding="utf-8", body=b"1"),
        dataclasses.replace(kept, content_type="application/json"),
        dataclasses.replace(kept, body=b"1"),
    ):
        with pytest.raises(ResultUnavailable):
            read_response(no_response)


@pytest.mark.parametrize(
    ("head", "seen"),
    [
        (
            b"Set-Cookie: sid=evil\r\nTransfer-Encoding: chunked\r\nUpgrade: a\r\nX-Own: 1",
            ["X-Own"],
        ),
        *((head, None) for head in (b"X-Own: a\x00b", b"X-Own: a\nX: b", b"X Own: 1", b": 1")),
    ],
)
def test_an_altered_record_passes_no_header_that_is_never_stored(
    head: bytes, seen: list[str] | None
) -> None:
    body = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\nbody"
    stored = Stored(content_type="application/http", content_encoding="binary", body=body)
    if seen is None:
        with pytest.raises(ResultUnavailable):
            read_response(stored)
    else:
        names = [name for name, _ in read_response(stored).headers]
        assert names == [*seen, "Idempotent-Replayed"]


def test_a_response_over_its_limit_is_not_kept() -> None:
    assert read_response(packed(HttpResponse("four"), 4)).body == b"four"
    with pytest.raises(ResultUnavailable, match="was not kept"):
        read_response(packed(HttpResponse("fiver"), 4))


@pytest.mark.parametrize("name", ["Content-Type", "content-type"])
def test_a_replay_has_the_content_type_of_its_first_answer_however_that_is_written(
    name: str,
) -> None:
    made = HttpResponse(b"{}", headers={name: "application/json"})
    replay = kept_again(made)
    assert replay["Content-Type"] == "application/json"
    del made["Content-Type"]
    assert "Content-Type" not in kept_again(made)


# Callers -------------------------------------------------------------------------------------------------------------


def test_no_two_callers_share_a_scope(factory: Any) -> None:
    from types import SimpleNamespace

    from django.contrib.auth.models import Group, User

    class Customer(SimpleNamespace):
        """Another kind of user."""

    request, options = factory.post("/"), http_options()
    scopes = []
    kinds: list[Any] = [SimpleNamespace, Customer, Group]
    for kind in kinds:
        for pk in (1, "1", "user", 2, 1.5):
            request.user = kind(pk=pk)
            request.user.is_authenticated = True
            scopes.append(http_identity("http", caller_scope(request, options), "k").scope)
    for number in (1, 2):
        request.user = User(pk=number)
        scopes.append(http_identity("http", caller_scope(request, options), "k").scope)
    # What a project gives its own tasks as scope never is a user's.
    scopes += [http_identity("http", scope, "k").scope for scope in (1, "1", ("session", "1"))]
    assert len(set(scopes)) == len(scopes)
    request.user = SimpleNamespace(pk=None, is_authenticated=False)
    blank = {"scope": lambda _: ("tenant", "")}
    for given in ({}, {"scope": lambda _: None}, {"scope": session_scope}, blank):
        with pytest.raises(RequestRefused):
            http_identity("http", caller_scope(request, http_options(given)), "k")


@pytest.mark.parametrize("kind", ["cache", "signed_cookies"])
def test_a_session_is_a_caller_whose_key_no_record_has(factory: Any, kind: str) -> None:
    """Who reads records takes over no session; signed cookies have no session, but all its content for a key."""
    from importlib import import_module

    from django.contrib.auth.models import AnonymousUser

    request, options = factory.post("/"), http_options({"scope": session_scope})
    request.user = AnonymousUser()
    store = import_module(f"django.contrib.sessions.backends.{kind}").SessionStore
    request.session = store()
    request.session["cart"] = [1]
    request.session.save()
    request.COOKIES["sessionid"] = key = request.session.session_key
    assert key
    if kind == "signed_cookies":
        with pytest.raises(RequestRefused) as refused:
            caller_scope(request, options)
        assert refused.value.code == "caller_unknown"
        return
    first = http_identity("http", caller_scope(request, options), "k")
    assert key not in str(first)
    request.session = store(session_key=key)
    assert http_identity("http", caller_scope(request, options), "k") == first
    assert caller_scope(request, http_options()) is None


def test_a_user_without_a_number_is_nobody(factory: Any) -> None:
    """Two service accounts that were never saved are two callers."""
    from types import SimpleNamespace

    from django.contrib.auth.models import User

    request = factory.post("/")
    others = [SimpleNamespace(pk=pk, is_authenticated=True) for pk in (None, "")]
    for user in (User(username="robot"), *others):
        request.user = user
        with pytest.raises(RequestRefused) as refused:
            caller_scope(request, http_options())
        assert refused.value.code == "caller_unknown"
        with pytest.raises(InvalidKey, match="primary key"):
            user_scope(user)


def test_a_model_that_extends_the_users_is_the_same_user() -> None:
    from django.contrib.auth.models import User

    with isolate_apps("django.contrib.auth"):

        class Member(User):
            """A user, and more."""

            class Meta:
                app_label = "auth"

    for user in (User(pk=7), Member(id=7, user_ptr_id=7)):
        assert user_scope(user) == ("user", 7)


@pytest.mark.parametrize("scope", ["", "x" * 256, "a\tb", ("a", "b" * 300), ["\x00"]])
def test_a_scope_that_cannot_be_one_is_no_caller(scope: Any) -> None:
    with pytest.raises(RequestRefused) as refused:
        http_identity("http", scope, "k")
    assert refused.value.code == "caller_unknown"
