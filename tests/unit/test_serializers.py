"""Serializers: what comes back is what went in, and what cannot come back is never stored."""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu import serialization
from kombu.exceptions import SerializerNotInstalled

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.errors import InvalidOption, ResultUnavailable, StoreMisconfigured
from celery_idempotent.protocol.options import Policy
from celery_idempotent.protocol.run import end_of
from celery_idempotent.records import EndState, State, Stored
from celery_idempotent.serializers import NotStored, Serializer, first_accepted

SECRET = "4111-1111-1111-1111"
JSON = Serializer("json")
PICKLE = Serializer("pickle", ("json", "pickle"))

exact_in_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
    | st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc))
    | st.dates()
    | st.times()
    | st.decimals(allow_nan=False)
    | st.uuids(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(codec="utf-8")).filter("__type__".__ne__), inner)
    ),
    max_leaves=10,
)


LOOP: list[object] = []
LOOP.append(LOOP)


def stored(serializer: Serializer, value: object) -> Stored:
    answer = serializer.dump(value)
    assert isinstance(answer, Stored)
    return answer


class Secretive:
    """Cannot be pickled, and says too much when it is asked why."""

    def __init__(self) -> None:
        self.handler = lambda: SECRET

    def __repr__(self) -> str:
        return SECRET

    def __reduce__(self) -> Any:
        raise ValueError(SECRET)


class Picky(Exception):
    """Pickles, but cannot be rebuilt: its class asks for two arguments and passes on one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Register a serializer with kombu until the end of the test."""
    names = []

    def register(name: str, *args: Any, **kwargs: Any) -> None:
        serialization.register(name, *args, **kwargs)
        names.append(name)

    yield register
    for name in names:
        serialization.unregister(name)


@given(exact_in_json)
def test_json_gives_back_exactly_what_it_was_given(value: object):
    back = JSON.load(stored(JSON, value))
    assert back == value
    assert type(back) is type(value)


FALSE = {"__type__": "unheard-of", "__value__": 1}, {"__type__": "uuid", "__value__": {"hex": "no"}}


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, {("a", "b"): 1}, Secretive(), 10**5000, FALSE[0], [FALSE[1]], LOOP],
    ids=["object", "set", "key", "secretive", "endless", "false type", "false uuid", "loop"],
)
def test_what_json_cannot_bring_back_is_not_stored(value: object):
    with pytest.raises(NotStored, match=f"a {type(value).__qualname__} cannot be written as json"):
        JSON.dump(value)


@pytest.mark.parametrize("value", [lambda: None, Secretive(), Picky("a", "b")])
def test_what_pickle_cannot_bring_back_is_not_stored(value: object):
    with pytest.raises(NotStored, match="cannot be written") as refused:
        PICKLE.dump(value)
    assert SECRET not in str(refused.value)


def test_a_value_may_have_as_many_bytes_as_allowed_and_no_more():
    assert isinstance(JSON.dump("é" * 10, max_bytes=62), Stored)
    with pytest.raises(NotStored, match="a str takes 62 bytes as json, and 61 are allowed"):
        JSON.dump("é" * 10, max_bytes=61)
    with pytest.raises(NotStored):
        JSON.dump("é" * 10, max_bytes=0)
    # Nor is it read back to check it.
    with pytest.raises(NotStored, match="a dict takes 42 bytes as json, and 5 are allowed"):
        JSON.dump({"__type__": "unheard-of", "__value__": 1}, max_bytes=5)


def test_a_pickle_is_refused_unless_the_app_accepts_pickle():
    class Trap:
        def __reduce__(self) -> Any:
            return os._exit, (70,)

    trap = Stored(
        content_type="application/x-python-serialize",
        content_encoding="binary",
        body=pickle.dumps(Trap()),
    )
    with pytest.raises(StoreMisconfigured, match="'pickle', which this app does not accept"):
        JSON.load(trap)


@pytest.mark.parametrize(
    "content_type", ["application/data", "text/plain", "application/x-unheard-of", ""]
)
def test_a_type_that_nobody_asked_for_is_refused(content_type: str):
    with pytest.raises(StoreMisconfigured):
        JSON.load(Stored(content_type=content_type, content_encoding="utf-8", body=b"x"))


@pytest.mark.parametrize(
    ("serializer", "body"),
    [
        (JSON, SECRET.encode()),
        (JSON, b'{"__type__": "4111-1111-1111-1111", "__value__": 1}'),
        (JSON, b"\xff"),
        (PICKLE, b"\x80\x04cos\nno_such_thing\n."),
        (PICKLE, SECRET.encode()),
    ],
)
def test_a_damaged_body_is_reported_without_its_content(serializer: Serializer, body: bytes):
    content_type = stored(serializer, 1).content_type
    with pytest.raises(ResultUnavailable, match="cannot be read") as caught:
        serializer.load(Stored(content_type=content_type, content_encoding="utf-8", body=body))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_of_several_formats_the_first_that_the_app_reads_is_taken():
    assert first_accepted("pickle", ["json", "pickle"]) == "pickle"
    assert first_accepted("pickle", ["yaml", "json"]) == "yaml"
    assert first_accepted("pickle", ["application/json"]) == "json"
    assert first_accepted("pickle", ["unheard/of"]) == "pickle"  # which Serializer refuses


def test_a_serializer_whose_package_is_missing_is_refused(register: Callable[..., None]):
    def missing(_: object) -> object:
        raise SerializerNotInstalled("get it")

    register("missing", missing, missing, "application/x-missing")
    with pytest.raises(InvalidOption, match="is 'missing', which is not installed"):
        Serializer("missing", ["missing"])
    register("half", str, missing, "application/x-half")
    half = Serializer("json", ["json", "half"])
    body = Stored(content_type="application/x-half", content_encoding="utf-8", body=b"1")
    with pytest.raises(StoreMisconfigured, match="package is not installed"):
        half.load(body)


def test_a_format_that_writes_what_it_cannot_read_is_found_out(register: Callable[..., None]):
    register("lossy", repr, int, "application/x-lossy")
    lossy = Serializer("lossy", ["lossy"])
    assert lossy.load(stored(lossy, 17)) == 17
    with pytest.raises(NotStored):
        lossy.dump("a")


@pytest.mark.parametrize(
    ("name", "kept", "refused"),
    [
        ("msgpack", {"a": [1, b"b", None]}, [{1: "a"}, 2**70, uuid.uuid4()]),
        ("yaml", {"a": {1, 2}}, [{("a", "b"): 1}, decimal.Decimal(1)]),
    ],
)
def test_others_keep_only_what_they_can_read(name: str, kept: object, refused: list[object]):
    pytest.importorskip(name)
    serializer = Serializer(name, [name])
    assert serializer.load(stored(serializer, kept)) == kept
    for value in refused:
        with pytest.raises(NotStored):
            serializer.dump(value)


@pytest.mark.parametrize(
    ("state", "value", "said"),
    [
        (State.COMPLETED, "x" * 100, "duplicates will look for it in the result backend"),
        (State.FAILED, ValueError("x" * 100), "duplicates get ResultUnavailable"),
    ],
)
def test_the_log_says_what_duplicates_get_of_what_is_not_kept(
    caplog: pytest.LogCaptureFixture, state: EndState, value: object, said: str
) -> None:
    policy = Policy(max_result_bytes=10)
    codec = TaskCodec(Celery(set_as_current=False), "shop.charge", policy)
    run: Any = Mock(replaced=False, codec=codec, policy=policy)
    assert end_of(run, state, value).value is None
    assert said in caplog.text
    assert "xxx" not in caplog.text
