"""What records say of themselves to people."""

from __future__ import annotations

import pickle

from celery_idempotent.records import Claimed, Identity, Record, State, Stored

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
