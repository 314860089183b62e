"""What a task's codec says of what it cannot keep."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.protocol.options import Policy


@pytest.mark.parametrize(
    ("dump", "value", "said"),
    [
        ("dump_value", "x" * 100, "duplicates will look for it in the result backend"),
        ("dump_error", ValueError("x" * 100), "duplicates get ResultUnavailable"),
    ],
)
def test_the_log_says_what_duplicates_get_of_what_is_not_kept(
    caplog: pytest.LogCaptureFixture, dump: str, value: object, said: str
) -> None:
    codec = TaskCodec(Celery(set_as_current=False), "shop.charge", Policy(max_result_bytes=10))
    assert getattr(codec, dump)(value) is None
    assert said in caplog.text
    assert "xxx" not in caplog.text
