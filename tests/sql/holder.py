"""A process that holds a claim's transaction open, to be frozen: ``python -m tests.sql.holder``.

Reads its orders as JSON from stdin: database settings, identity and token of the claim. Says ``ready`` once it has
written, waits for a line, then tries to settle and commit, and says how that went.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from celery_idempotent.records import Identity, Record, SettleRequest, State
from tests.sql import databases


def main() -> None:
    orders: dict[str, Any] = json.loads(sys.stdin.readline())
    with databases.ready(Path(orders["directory"])):
        from django.db import Error

        from celery_idempotent.django.store import DjangoStore

        alias = databases.add_alias("held", orders["settings"])
        record = Record(
            identity=Identity(**orders["identity"]),
            state=State.PROCESSING,
            token=orders["token"],
            created_ms=0,
            updated_ms=0,
        )
        try:
            with DjangoStore(alias).transaction(record) as run:
                databases.execute(alias, "UPDATE effects SET n = n + 1")
                _say("ready")
                sys.stdin.readline()
                run.settle(
                    SettleRequest(
                        record=record, state=State.COMPLETED, value=None, keep_ms=10_000_000
                    )
                )
                if orders.get("before_commit"):
                    _say("settled")
                    sys.stdin.readline()
        except (Error, Exception) as error:  # noqa: BLE001 - the test looks at what it was
            _say(f"failed {type(error).__name__}")
        else:
            _say("committed")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
