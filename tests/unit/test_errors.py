"""Errors and records: each survives the ways by which it is handed on, and tells people nothing that is secret."""

from __future__ import annotations

import inspect
import pickle

import pytest

import celery_idempotent
from celery_idempotent import errors
from celery_idempotent.errors import DuplicateCall, IdempotencyError, InProgress, TooManyCrashes
from celery_idempotent.records import Claimed, Identity, Record, State, Stored

ALL = [
    each
    for each in vars(errors).values()
    if inspect.isclass(each) and issubclass(each, IdempotencyError)
]

EXAMPLES = [
    *[each("what is wrong with shop.charge key order-1") for each in ALL],
    *[each() for each in ALL],
    InProgress("held", "task-1", 12.5),
    InProgress("held", None, 0.0),
    DuplicateCall("called", "task-1", "PROCESSING"),
    TooManyCrashes("enough", 4),
]


def same(error: BaseException, other: BaseException) -> None:
    assert type(other) is type(error)
    assert other.args == error.args
    assert str(other) == str(error)
    for name in ("task_id", "expires_in", "crashes", "state"):
        assert getattr(other, name, "") == getattr(error, name, "")


@pytest.mark.parametrize("error", ALL)
def test_the_default_message_is_the_first_line_of_the_docstring(error):
    assert getattr(celery_idempotent, error.__name__) is error
    message = str(error())
    assert message == inspect.getdoc(error).splitlines()[0]
    assert message.endswith(".") or error is errors.StoreUnavailable
    assert str(error("mine")) == "mine"


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_each_comes_out_of_a_pickle_of_celerys_json_and_of_a_result_backend(app, error):
    backend = app.backend
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        same(error, pickle.loads(pickle.dumps(error, protocol)))
    same(error, backend.exception_to_python(backend.prepare_exception(error, "pickle")))
    backend.store_result(f"id-{id(error)}", error, "FAILURE")
    again = backend.get_result(f"id-{id(error)}")
    same(error, again)
    same(error, backend.exception_to_python(backend.prepare_exception(again, "json")))


SECRET = Stored(
    content_type="application/json", content_encoding="utf-8", body=b'"4111 1111 1111 1111"'
)
RECORD = Record(
    identity=Identity(namespace="shop.charge", key="order-17"),
    state=State.COMPLETED,
    token=17,
    created_ms=1,
    updated_ms=2,
    task_id="t1",
    value=SECRET,
    steps=(("pay", SECRET),),
    message=b'[["4111 1111 1111 1111"], {}]',
)


def test_no_text_of_a_record_has_a_result_a_step_or_arguments():
    for text in (repr(RECORD), str(RECORD), repr(Claimed(RECORD)), repr(RECORD.value)):
        assert "4111" not in text
    assert "shop.charge" in repr(RECORD)
    assert "application/json" in repr(RECORD)
    assert "'pay'" in repr(RECORD)


def test_a_value_survives_pickling():
    assert pickle.loads(pickle.dumps(RECORD)) == RECORD
