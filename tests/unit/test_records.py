"""What records say of themselves to people."""

from __future__ import annotations

import pickle
from dataclasses import replace

from celery_idempotent.records import Claimed, Identity, Record, Reserved, State, Stored

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


def test_records_with_the_same_content_are_equal():
    again = replace(RECORD, token=RECORD.token)

    assert again == RECORD
    assert replace(RECORD, token=18) != RECORD
    assert Claimed(RECORD) == Claimed(again)


def test_values_of_two_classes_are_never_equal():
    assert Reserved(RECORD) != Claimed(RECORD)
    assert RECORD.identity != "shop.charge key order-17"


def test_a_value_shows_its_fields():
    identity = Identity(namespace="shop.charge", key="order-17")

    assert repr(identity) == "Identity(namespace='shop.charge', scope='', key='order-17')"


def test_a_value_survives_pickling():
    assert pickle.loads(pickle.dumps(RECORD)) == RECORD
