"""``python -m testproject demo_users``: the tables, and alice, bob and admin, whose passwords are their names.

``--records``: also a payment in each state; the first sweep makes the lost one INTERRUPTED.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, CommandParser, call_command

from celery_idempotent import records
from celery_idempotent.stores import get_store
from testproject.payments.bank import PaymentRefused
from testproject.payments.tasks import pay

_DAY_MS = 86_400_000


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--records", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        users: Any = get_user_model().objects
        for name in ("alice", "bob", "admin"):
            if not users.filter(username=name).exists():
                make = users.create_superuser if name == "admin" else users.create_user
                make(name, password=name)
        if options["records"]:
            _leave_records()


def _leave_records() -> None:
    definition: Any = pay.idempotency_definition()
    store, codec = get_store(pay.app), definition.codec
    closed = PaymentRefused("The account acct_closed is closed.")
    ends: dict[str, dict[str, Any]] = {
        "paid": {"state": records.State.COMPLETED, "value": codec.dump_given({"id": 1})},
        "refused": {"state": records.State.FAILED, "value": codec.dump_error(closed)},
    }
    for key in ("paid", "refused", "running", "lost", "queued"):
        identity = records.Identity(namespace=pay.name, key=key)
        about: Any = {"identity": identity, "task_id": str(uuid4()), "keep_ms": _DAY_MS}
        if key == "queued":
            store.reserve(records.ReserveRequest(**about, deadline_ms=_DAY_MS))
            continue
        about |= {"lease_ms": 1 if key == "lost" else _DAY_MS, "worker": "worker-1.example:4711"}
        claimed = store.claim(records.ClaimRequest(**about, attempt=os.urandom(8))).record
        if key in ends:
            store.settle(records.SettleRequest(record=claimed, keep_ms=_DAY_MS, **ends[key]))
