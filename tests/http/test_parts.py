"""The parts of the HTTP side, each by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.errors import InvalidOption, ResultUnavailable
from celery_idempotent.records import State, Stored
from tests.sql.databases import ready
from tests.support.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def _django(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ready(tmp_path_factory.mktemp("parts")):
        yield


@pytest.fixture
def factory() -> Any:
    from django.test import RequestFactory

    return RequestFactory()


def view(_request: Any) -> None:
    """A view."""


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"leese": 3}, "did you mean lease?"),
        ({"nonsense": 3}, "known are"),
        ({"lease": "long"}, "seconds or a timedelta"),
        ({"lease": 0}, "at least 0.1 seconds"),
        ({"required": "yes"}, "True or False"),
        ({"anonymous": "everybody"}, "is one of"),
        ({"methods": ["GET"]}, "never guarded"),
        ({"methods": "POST"}, "sequence"),
        ({"headers": ["Set-Cookie"]}, "none of"),
        ({"headers": ["date"]}, "none of"),
        ({"unstored": [500]}, "below 500"),
        ({"scope": 5}, "function of the request"),
        ({"checks": ["no.such.module"]}, "No module named"),
        ({"checks": [5]}, "functions"),
        ({"max_crashes": -1}, "from 0"),
        ({"namespace": ""}, "printable"),
        ({"docs_url": 5}, "text"),
        ({"atomic": True, "on_store_error": "open"}, "excludes"),
    ],
)
def test_a_bad_option_is_refused_where_it_is_given(options: dict[str, Any], said: str) -> None:
    from celery_idempotent.django.http import idempotent_view

    with pytest.raises((InvalidOption, ImportError), match=said):
        idempotent_view(**options)(view)


def test_an_option_that_would_do_nothing_is_refused() -> None:
    from celery_idempotent.django.http import idempotent_view, keyed_view

    for idle in ({"lease": 5}, {"atomic": True}, {"checks": ()}, {"namespace": "x"}):
        with pytest.raises(InvalidOption, match="does nothing for keyed_view"):
            keyed_view(**idle)
    for queueing in ({"on_pending": "refuse"}, {"show_errors": "all"}):
        assert keyed_view(**queueing)(view).__name__ == "view"
        with pytest.raises(InvalidOption, match="does nothing for idempotent_view"):
            idempotent_view(**queueing)
    with pytest.raises(InvalidOption, match="did you mean strict"):
        keyed_view(strickt=True)(view)


def test_the_setting_is_read_and_the_view_wins() -> None:
    from django.test import override_settings

    from celery_idempotent.django.http.options import read_options

    with override_settings(IDEMPOTENCY_HTTP={"lease": 7, "required": False}):
        assert (read_options().lease, read_options({"lease": 9}).lease) == (7, 9)
        assert read_options({"lease": 9}).required is False
    for wrong in ({"leese": 1}, "lease", {"lease": None}):
        with override_settings(IDEMPOTENCY_HTTP=wrong), pytest.raises(InvalidOption):
            read_options()


def test_a_decorated_view_follows_the_setting() -> None:
    from django.test import override_settings

    from celery_idempotent.django.http import idempotent_view
    from celery_idempotent.django.http.decorators import marks_of

    marks = marks_of(idempotent_view(view))
    assert marks is not None
    assert marks.options.lease == 30
    with override_settings(IDEMPOTENCY_HTTP={"lease": 7}):
        assert marks.options.lease == 7
    assert marks.options.lease == 30


def test_a_class_that_is_no_view_is_refused() -> None:
    from celery_idempotent.django.http import idempotent_view

    with pytest.raises(InvalidOption, match="dispatch"):
        idempotent_view(dict)


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
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("a:b/c?d=e&f", "a:b/c?d=e&f"),
    ],
)
def test_a_key_is_a_string_of_rfc_8941_or_bare(factory: Any, value: str, key: str) -> None:
    from celery_idempotent.django.http.headers import read_key

    assert read_key(factory.post("/", HTTP_IDEMPOTENCY_KEY=value), strict=False) == key
    assert read_key(factory.post("/"), strict=True) is None


@pytest.mark.parametrize(
    "value", ['"a" ;x', '"a";X=1', '"a";x=', '"a";x="', "a\tb", "\x7f", "é", '"a\nb"', "(a)b,c"]
)
def test_whatever_else_is_refused(factory: Any, value: str) -> None:
    from celery_idempotent.django.http.headers import read_key
    from celery_idempotent.django.http.problems import Refusal

    with pytest.raises(Refusal) as refused:
        read_key(factory.post("/", HTTP_IDEMPOTENCY_KEY=value), strict=False)
    assert refused.value.code == "idempotency_key_invalid"


# Fingerprints --------------------------------------------------------------------------------------------------------


def fingerprint(request: Any, **options: Any) -> bytes:
    from celery_idempotent.django.http.fingerprints import request_fingerprint
    from celery_idempotent.django.http.options import read_options

    return request_fingerprint(request, request, read_options(options))


def test_json_that_says_the_same_is_the_same(factory: Any) -> None:
    def of(body: bytes, content_type: str = "application/json") -> bytes:
        return fingerprint(factory.post("/", body, content_type=content_type))

    assert of(b'{"a":1,"b":[1,2]}') == of(b' { "b" : [1, 2], "a": 1 }')
    assert of(b'"\\u00e9"') == of('"é"'.encode())
    assert of(b'{"a":1}', "application/merge-patch+json") == of(b'{"a": 1}')
    different = [
        b'{"a":1}',
        b'{"a":1.0}',
        b'{"a":"1"}',
        b'{"a":true}',
        b'{"a":null}',
        b"{}",
        b"",
        b"{",
        b"{ ",
    ]
    assert len({of(body) for body in different}) == len(different)
    deep = b"[" * 100_000
    assert of(deep) != of(deep + b"[")
    assert of(b"1" * 5000) != of(b"1" * 5001)


def test_method_path_and_query_count(factory: Any) -> None:
    same = {fingerprint(factory.post(path)) for path in ("/a/?x=1&y=2", "/a/?y=2&x=1")}
    assert len(same) == 1
    others = [factory.put("/a/"), factory.post("/a/"), factory.post("/b/"), factory.post("/a/?x=1")]
    assert len({fingerprint(each) for each in others}) == len(others)


def test_a_fingerprint_of_ones_own_counts_instead_of_the_body(factory: Any) -> None:
    def amount(request: Any) -> Any:
        return json.loads(request.body)["amount"]

    bodies = (b'{"amount": 1, "at": 5}', b'{"amount": 1, "at": 6}', b'{"amount": 2}')
    found = [
        fingerprint(factory.post("/", body, content_type="application/json"), fingerprint=amount)
        for body in bodies
    ]
    assert found[0] == found[1] != found[2]
    with pytest.raises(TypeError, match="no canonical form"):
        fingerprint(factory.post("/"), fingerprint=lambda _: object())


def test_a_body_stays_readable_for_the_view(factory: Any) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile

    upload = {"field": "x", "file": SimpleUploadedFile("a.txt", b"content")}
    request = factory.post("/", upload)
    fingerprint(request)
    assert request.POST["field"] == "x"
    assert request.FILES["file"].read() == b"content"
    request = factory.put("/", b"raw", content_type="text/plain")
    fingerprint(request)
    assert request.body == b"raw"


def test_a_form_that_is_no_post_counts_without_its_boundary(factory: Any) -> None:
    from django.test.client import encode_multipart

    def of(boundary: str, value: str) -> bytes:
        body = encode_multipart(boundary, {"a": value})
        kind = f"multipart/form-data; boundary={boundary}"
        return fingerprint(factory.put("/", body, content_type=kind))

    assert of("one", "x") == of("two", "x") != of("one", "y")


# Kept responses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 204, 404])
@pytest.mark.parametrize("body", [b"", b"text", bytes(range(256)), b"\r\n\r\n"])
def test_a_kept_response_is_the_same_bytes(status: int, body: bytes) -> None:
    from django.http import HttpResponse

    from celery_idempotent.django.http.messages import pack_response, read_response
    from celery_idempotent.django.http.options import read_options

    headers = {
        "Content-Type": "x/y; charset=é",
        "Location": "/a?b=c: d",
        "X-Own": "1",
        "X-Two": "2",
    }
    made = HttpResponse(body, status=status, reason="All Is Well", headers=headers)
    again = read_response(pack_response(made, read_options({"headers": ["X-Own"]}), name="v"))
    assert (again.status_code, again.content, again.reason_phrase) == (status, body, "All Is Well")
    assert dict(again.headers) == {
        **{name: headers[name] for name in ("Content-Type", "Location", "X-Own")},
        "Idempotent-Replayed": "true",
    }


def test_a_value_that_is_no_response_is_not_read_as_one() -> None:
    from celery_idempotent.django.http.messages import read_response

    with pytest.raises(ResultUnavailable):
        read_response(Stored(content_type="application/json", content_encoding="utf-8", body=b"1"))


def test_headers_without_measure_are_not_kept() -> None:
    from django.http import HttpResponse

    from celery_idempotent.django.http.messages import pack_response
    from celery_idempotent.django.http.options import read_options

    made = HttpResponse(headers={"Link": "x" * 40_000})
    with pytest.raises(ValueError, match="headers"):
        pack_response(made, read_options(), name="v")


# Callers -------------------------------------------------------------------------------------------------------------


def test_no_two_callers_share_a_scope(factory: Any) -> None:
    from types import SimpleNamespace

    from celery_idempotent.django.http.guards import http_identity
    from celery_idempotent.django.http.options import read_options
    from celery_idempotent.django.http.problems import Refusal
    from celery_idempotent.django.http.scopes import caller_scope

    request, options = factory.post("/"), read_options()
    scopes = []
    for pk in (1, "1", "user", 2, 1.5):
        request.user = SimpleNamespace(pk=pk, is_authenticated=True)
        scopes.append(http_identity("http", caller_scope(request, options), "k").scope)
    # What a project gives its own tasks as scope never is a user's.
    scopes += [http_identity("http", scope, "k").scope for scope in (1, "1", ("session", "1"))]
    assert len(set(scopes)) == len(scopes)
    request.user = SimpleNamespace(pk=None, is_authenticated=False)
    with pytest.raises(Refusal):
        caller_scope(request, options)
    with pytest.raises(Refusal):
        caller_scope(request, read_options({"scope": lambda _: None}))
    with pytest.raises(Refusal):
        caller_scope(request, read_options({"anonymous": "session"}))


def test_the_address_of_a_key_leads_back_to_it() -> None:
    from urllib.parse import unquote

    from celery_idempotent.django.http.status import _segment, _text

    keys = [
        "a",
        "a/b",
        "~",
        "~0",
        "~1",
        "~2",
        "~01",
        ".",
        "..",
        "...",
        "a~/~.",
        "%2F",
        "?#",
        "é",
        "~0/1",
    ]
    assert [_text(unquote(_segment(key))) for key in keys] == keys
    assert len({_segment(key) for key in keys}) == len(keys)
    assert not any("/" in _segment(key) or _segment(key) in {".", ".."} for key in keys)


def test_the_app_is_found_in_a_thread_of_a_web_server() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from celery_idempotent.django.http.current import celery_app

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(celery_app, "testproject.celery.app").result()
    assert found.main == "testproject"


# Queueing outside of the database -------------------------------------------------------------------------------------


@pytest.fixture
def shop() -> Iterator[Any]:
    """An app whose records are in memory, with a task."""
    from celery_idempotent import IdempotentTask

    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", broker_connection_retry=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}

    @app.task(base=IdempotentTask, name="shop.charge", shared=False)
    def charge(amount: int) -> int:
        return amount

    yield charge
    app.close()


def queue(factory: Any, charge: Any, **options: Any) -> Any:
    from celery_idempotent.django.http import enqueue

    request = factory.post("/", HTTP_IDEMPOTENCY_KEY="k")
    return enqueue(request, charge, kwargs={"amount": 1}, scope="ann", **options)


def record(charge: Any) -> Any:
    return charge.idempotency_record("k", scope="ann")


def waiting(charge: Any) -> int:
    with charge.app.connection_for_write() as connection:
        found: int = connection.default_channel._size("celery")
        return found


def test_outside_of_a_transaction_it_is_published_at_once(factory: Any, shop: Any) -> None:
    before = waiting(shop)
    assert queue(factory, shop).status_code == 202
    assert waiting(shop) == before + 1
    assert record(shop).state is State.QUEUED


def test_inside_of_a_transaction_it_is_published_after_the_commit(factory: Any, shop: Any) -> None:
    from django.db import transaction

    before = waiting(shop)
    with transaction.atomic():
        assert queue(factory, shop).status_code == 202
        assert waiting(shop) == before
        short = record(shop).deadline_ms - record(shop).updated_ms
    assert waiting(shop) == before + 1
    assert record(shop).deadline_ms - record(shop).updated_ms > short


def test_a_rollback_gives_the_key_back_and_publishes_nothing(factory: Any, shop: Any) -> None:
    from django.db import transaction

    before = waiting(shop)
    with transaction.atomic():
        assert queue(factory, shop).status_code == 202
        transaction.set_rollback(True)
    wait_for(lambda: record(shop) is None)
    assert waiting(shop) == before


def test_a_broker_that_is_down_is_503_and_leaves_the_key_free(factory: Any, shop: Any) -> None:
    from django.db import transaction

    shop.app.conf.broker_url = "amqp://127.0.0.1:1//"
    answer = queue(factory, shop)
    assert (answer.status_code, json.loads(answer.content)["code"]) == (503, "not_queued")
    assert record(shop) is None
    with transaction.atomic():
        assert queue(factory, shop).status_code == 202
        assert record(shop) is not None
    assert record(shop) is None, "who asks for the status learns that nothing is queued"


def test_a_task_that_is_switched_off_is_published_as_ever(factory: Any, shop: Any) -> None:
    from celery_idempotent import IdempotentTask

    @shop.app.task(base=IdempotentTask, name="shop.plain", idempotency_mode="off", shared=False)
    def plain(amount: int) -> int:
        return amount

    before = waiting(shop)
    assert [queue(factory, plain).status_code for _ in range(2)] == [202, 202]
    assert waiting(shop) == before + 2
