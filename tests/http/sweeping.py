"""A sweep of a site in a process of its own: ``python -m tests.http.sweeping outbox|store``; it writes what it did."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.preloaded import spawn

__all__ = ["sweep"]


def sweep(what: str, directory: Path, env: Mapping[str, str]) -> str:
    """Sweep the outbox, or the store at a time when the reservations of now count as lost; return what it wrote."""
    log = directory / "sweep.log"
    command = [sys.executable, "-m", "tests.http.sweeping", what]
    with log.open("wb") as output:
        code = spawn(command, cwd=directory, env=env, log=output).wait(60)
    told = log.read_text()
    if code != 0:
        raise subprocess.CalledProcessError(code, command, told)
    return told


def main(what: str) -> None:
    """Sweep."""
    import django

    django.setup()
    from testproject.celery import app

    app.loader.import_default_modules()
    if what == "outbox":
        from celery_idempotent.django import outbox

        outbox.sweep(app)
    else:
        from celery_idempotent import get_store
        from celery_idempotent.celery import sweep
        from celery_idempotent.stores.redis.store import RedisStore
        from tests.stores.shifted import Shift

        store = get_store(app)
        assert isinstance(store, RedisStore)
        Shift(store)(61_000)
        sys.stdout.write(f"{sweep.sweep(app)['requeued']}\n")


if __name__ == "__main__":
    main(sys.argv[1])
