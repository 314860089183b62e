"""``ATOMIC_REQUESTS`` of a guarded view: its guard opens the transaction, so that a record comes after the COMMIT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

Wrapped = TypeVar("Wrapped")


def non_atomic_databases(view: object) -> frozenset[str]:
    """Return the databases that ``non_atomic_requests`` named for this view."""
    return frozenset(getattr(view, "_non_atomic_requests", ()))


def unwrapped(view: Wrapped) -> Wrapped:
    """Keep Django from putting ``ATOMIC_REQUESTS`` around the guard."""
    vars(view)["_non_atomic_requests"] = set(connections)  # what non_atomic_requests sets
    return view


def atomic_aliases(without: frozenset[str]) -> list[str]:
    """Return the databases where a request is a transaction, ``without`` those named here."""
    return [
        alias
        for alias, database in connections.settings.items()
        if database["ATOMIC_REQUESTS"] and alias not in without
    ]


@contextmanager
def atomic_requests(without: frozenset[str]) -> Iterator[None]:
    """Be in the transactions that ``ATOMIC_REQUESTS`` asks for."""
    with ExitStack() as stack:
        for alias in atomic_aliases(without):
            stack.enter_context(transaction.atomic(using=alias))
        yield


def roll_back_requests() -> None:
    """Roll back the transactions of a request whose exception becomes an answer."""
    for alias in atomic_aliases(frozenset()):
        if connections[alias].in_atomic_block:
            transaction.set_rollback(True, using=alias)


def refuse_open_transactions() -> None:
    """Refuse to run inside a transaction: a record is settled after the COMMIT.

    Raises:
        ImproperlyConfigured: if there is a transaction around the guard.
    """
    for connection in connections.all(initialized_only=True):
        for block in getattr(connection, "atomic_blocks", ()):
            if not getattr(block, "_from_testcase", False):
                raise ImproperlyConfigured(
                    f"An idempotent view runs inside a transaction on {connection.alias!r}: its answer would be "
                    "recorded before the COMMIT, which may fail. Put the transaction inside of the view. A handler's "
                    "class, or what @api_view made, needs @non_atomic_requests under ATOMIC_REQUESTS, for a class by "
                    'method_decorator(non_atomic_requests, name="dispatch"): the guard opens that transaction inside.'
                )
