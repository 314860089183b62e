"""What a broker does to arguments and a record to results: keys and fingerprints stay equal, values come back."""

from __future__ import annotations

import enum
import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from tests.policies.conftest import PATIENCE, Site


class Colour(str, enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


#: Arguments as a program has them; JSON makes something else of most of these.
VALUES: dict[str, Any] = {
    "tuple": (1, (2, 3)),
    "datetime": datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=timezone.utc),
    "naive datetime": datetime(2024, 2, 29, 12, 30),  # noqa: DTZ001  as programs have them
    "other zone": datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    "date": date(2024, 2, 29),
    "decimal": Decimal("1.10"),
    "uuid": uuid.UUID(int=2**80 + 7),
    "str enum": Colour.RED,
    "int enum": Size.SMALL,
    "bytes": b"\x00\xff",
    "nested": {"at": (Decimal("0.1"), [date(2020, 1, 1)]), "n": None, "yes": True, "f": 1.0},
    "int keys": {1: "a", 2: "b"},
    "big": 2**80,
    "text": "ünï\u0000 \U0001f600",
}


OPTIONS: dict[str, Any] = {"kwargs": {"more": VALUES}}


def test_they_are_one_key_before_and_after_the_broker(on_redis: Site, key: str) -> None:
    """The second message has no stamp: the worker computes the key from what JSON made of the arguments."""
    task, args = on_redis.app.tasks["everything"], (key, *VALUES.values())
    first = task.apply_async(args, **OPTIONS).get(timeout=PATIENCE)
    assert on_redis.app.send_task("everything", args, **OPTIONS).get(timeout=PATIENCE) == first
    assert task.apply_async(args, **OPTIONS).get(timeout=PATIENCE) == first
    assert on_redis.ledger.count("start", key) == 1


def test_they_are_one_fingerprint_before_and_after_the_broker(on_redis: Site, key: str) -> None:
    args = (key, *VALUES.values())
    by_name = on_redis.app.send_task("fingerprinted", args, **OPTIONS)
    first = by_name.get(timeout=PATIENCE)
    again = on_redis.app.tasks["fingerprinted"].apply_async(args, **OPTIONS)
    assert again.get(timeout=PATIENCE) == first
    on_redis.deliver_again(on_redis.receipt(by_name.id))
    on_redis.idle(key)
    assert on_redis.ledger.count("start", key) == 1
    assert on_redis.ledger.count("mismatched", task_id=by_name.id) == 0
