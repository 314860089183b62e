"""A process that works on keys which others work on too: ``python -m tests.sql.writer DIRECTORY COUNT``.

For each key that it gets it appends a line to a file, and settles, in Django's ``default`` database.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import django

from celery_idempotent.records import Claimed, ClaimRequest, Identity, Renewal, SettleRequest, State


def main(directory: Path, count: int) -> None:
    django.setup()
    from celery_idempotent.django.store import DjangoStore

    store = DjangoStore("default")
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
