"""A process that works on keys which others work on too: ``python -m tests.sql.writer DIRECTORY DATABASE COUNT``.

For each key that it gets it appends a line to a file, and settles.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from celery_idempotent.records import Claimed, ClaimRequest, Identity, Renewal, SettleRequest, State
from tests.sql import databases


def main(directory: Path, name: str, count: int) -> None:
    with databases.ready(directory):
        from celery_idempotent.django.store import DjangoStore

        # Django's own settings, but for the patience with a locked file.
        settings = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": name,
            "OPTIONS": {"timeout": 20},
        }
        store = DjangoStore(databases.add_alias("shared", settings))
        keys = [f"order-{n}" for n in range(count)]
        random.shuffle(keys)
        for key in keys:
            answer = store.claim(
                ClaimRequest(
                    identity=Identity(namespace="charge", key=key),
                    attempt=os.urandom(8),
                    lease_ms=60_000,
                    keep_ms=60_000,
                )
            )
            if isinstance(answer, Claimed):
                record = answer.record
                with (directory / "effects").open("a") as file:
                    file.write(f"{key}\n")
                lease = Renewal(
                    identity=record.identity, token=record.token, lease_ms=60_000, keep_ms=60_000
                )
                assert store.renew([lease]) == [True]
                assert store.settle(
                    SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
                )
        store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
