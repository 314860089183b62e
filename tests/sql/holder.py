"""A process that holds a claim's transaction open, to be frozen: ``python -m tests.sql.holder``.

Its database is Django's ``default``; identity and token of the claim are in the environment as JSON. It says ``ready``
once it has written, waits for a line from a pipe, then tries to settle and commit, and says how that went.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import django

from celery_idempotent.records import Identity, Record, SettleRequest, State
from tests.sql import databases

#: The environment variable with the orders, and what stands before the words of this process in its log.
ORDERS, SAID = "HOLDER_ORDERS", "holder: "


def main(orders: dict[str, Any]) -> None:
    django.setup()
    from django.db import Error

    from celery_idempotent.django.store import DjangoStore

    record = Record(
        identity=Identity(**orders["identity"]),
        state=State.PROCESSING,
        token=orders["token"],
        created_ms=0,
        updated_ms=0,
        deadline_ms=orders["lease_ms"],
    )
    try:
        with (
            Path(orders["pipe"]).open() as pipe,
            DjangoStore("default").transaction(record) as run,
        ):
            databases.execute("default", "UPDATE effects SET n = n + 1")
            _say("ready")
            pipe.readline()
            run.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=10_000_000)
            )
            if orders["before_commit"]:
                _say("settled")
                pipe.readline()
    except (Error, Exception) as error:  # noqa: BLE001 - the test looks at what it was
        _say(f"failed {type(error).__name__}")
    else:
        _say("committed")


def _say(word: str) -> None:
    sys.stdout.write(f"{SAID}{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(os.environ[ORDERS]))
