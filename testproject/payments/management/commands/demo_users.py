"""``python -m testproject demo_users``: the tables, and alice, bob and admin, whose passwords are their names."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, call_command


class Command(BaseCommand):
    help = __doc__

    def handle(self, *_: Any, **__: Any) -> None:
        call_command("migrate", verbosity=0)
        users: Any = get_user_model().objects
        for name in ("alice", "bob"):
            if not users.filter(username=name).exists():
                users.create_user(name, password=name)
        if not users.filter(username="admin").exists():
            users.create_superuser("admin", password="admin")
