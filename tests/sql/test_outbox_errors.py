"""What the outbox tells about a failure says nothing that a broker's URL should keep to itself."""

from __future__ import annotations

import pytest

pytest.importorskip("django")


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:secret@rabbit:5672//",
        "amqp://user:sec@ret@rabbit:5672//",
        "amqp://user:sec/ret@rabbit/vhost",
        "redis://:sec#?ret@redis:6379/0",
        "amqp://user:secret@rabbit//;amqp://user:secret@rabbit//",
    ],
)
def test_credentials_are_masked(sql_databases: object, url: str) -> None:
    from celery_idempotent.django.outbox import error_text

    told = error_text(OSError(f"cannot reach {url} (twice)"))
    assert told.startswith("OSError: cannot reach ")
    assert told.endswith(" (twice)")
    for secret in ("user", "sec", "ret"):
        assert secret not in told
    assert "***@r" in told


def test_what_is_no_url_is_told_whole(sql_databases: object) -> None:
    from celery_idempotent.django.outbox import error_text

    said = "see https://docs.example/errors or write to ops@example.com"
    assert error_text(ValueError(said)) == f"ValueError: {said}"
