"""Work that is committed, on a thread's connection of a project that commits by hand (``AUTOCOMMIT = False``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from django.db import Error

from celery_idempotent.django.sql.connections import transaction_begun
from celery_idempotent.errors import StoreMisconfigured

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def commits_by_hand(own: BaseDatabaseWrapper) -> bool:
    """Does only the project itself commit what is written on this connection?"""
    return not own.settings_dict["AUTOCOMMIT"] and not own.in_atomic_block


@contextmanager
def committing(own: BaseDatabaseWrapper) -> Iterator[None]:
    """Switch the thread's connection to autocommit for the block: statements and ``atomic()`` commit by themselves.

    Raises:
        StoreMisconfigured: if the project's own transaction is open, which would be committed with them.
    """
    if not commits_by_hand(own):
        yield
        return
    if own.connection is not None and transaction_begun(own):
        raise StoreMisconfigured(
            f"with AUTOCOMMIT = False a transaction is open on the database {own.alias!r}, begun by what was read or "
            "written there before. What is to be committed by itself cannot be a part of it: commit or roll back first"
        )
    settings = own.settings_dict
    # For a connection that is opened within the block. One that is open already is switched below.
    own.settings_dict = {**settings, "AUTOCOMMIT": True}
    done = False
    try:
        if own.connection is not None:
            own.set_autocommit(True)
        yield
        done = True
    finally:
        own.settings_dict = settings
        if own.connection is not None and not own.in_atomic_block:
            with suppress(Error):
                if done:
                    own.set_autocommit(False)
                else:
                    own.close()  # an interrupted connection may be in any state
