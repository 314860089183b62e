"""The receiver, on the store that the environment names: what it makes of deliveries is printed as JSON.

Runs in a process of its own, for which Django is set up: settings are read once in a process.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

if __name__ == "__main__":
    import django

    django.setup()

from django.conf import settings
from django.core.management import call_command
from django.test import Client

from celery_idempotent import get_store
from celery_idempotent.testing import crash_matrix
from testproject.celery import app
from testproject.webhooks import tasks
from testproject.webhooks.models import Kind, LedgerEntry, Run


def main() -> None:
    # Tasks run where they are called, by the same protocol.
    settings.CELERY_TASK_ALWAYS_EAGER = True
    call_command("migrate", verbosity=0)
    thrice, broken = str(uuid.uuid4()), str(uuid.uuid4())
    for _ in range(3):
        deliver(thrice)
    tasks.written.connect(fail)
    deliver(broken)
    left = entries(broken)
    tasks.written.disconnect(fail)
    deliver(broken)
    record = tasks.record_delivery.idempotency_record(key=broken)  # type: ignore[attr-defined]
    told = {
        "store": type(get_store(app)).__name__,
        "atomic": tasks.record_delivery.idempotency_atomic,  # type: ignore[attr-defined]
        "entered_of_three": entries(thrice),
        "left_by_the_failure": left,
        "entered_in_the_end": entries(broken),
        "runs": Run.objects.filter(kind=Kind.IDEMPOTENT, delivery_id=broken).count(),
        "record": record.state.value,
        "killed_at_each_line": killed(),
    }
    for key in (thrice, broken):
        tasks.record_delivery.idempotency_forget(key=key)  # type: ignore[attr-defined]
    sys.stdout.write(json.dumps(told))


def deliver(delivery: str) -> None:
    headers: Any = {"HTTP_X_GITHUB_EVENT": "push", "HTTP_X_GITHUB_DELIVERY": delivery}
    answer = Client(SERVER_NAME="localhost").post(
        "/webhooks/github/", b"{}", "application/json", **headers
    )
    assert answer.status_code == 202, answer.content


def entries(delivery: str) -> int:
    return LedgerEntry.objects.filter(kind=Kind.IDEMPOTENT, delivery_id=delivery).count()


def killed() -> dict[str, list[int]]:
    """Return what kills at each line came to: how many there were of each verdict, at each number of entries."""
    try:
        report = crash_matrix(
            tasks.record_delivery,
            arguments=lambda delivery: [delivery, "push"],
            effects=entries,
        )
    except AssertionError as trouble:
        found = [line.split()[0] for line in str(trouble).splitlines()[1:]]
        return {"DOUBLED": [found.count("DOUBLED")], "LOST": [found.count("LOST")]}
    return {place.verdict: [place.effects] for place in report.places}  # type: ignore[list-item]


def fail(sender: Any, **_: Any) -> None:
    if sender.name == tasks.record_delivery.name:
        raise ValueError("after the write")


if __name__ == "__main__":
    main()
