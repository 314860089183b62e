"""``erase``: all that is stored of a scope, when a tenant leaves.

The outbox goes first: a message that is sent while records are deleted would make a new one::

    count the records ─ ask ─ discard staged messages ─ forget record by record ─ again, until a walk finds none
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from celery_idempotent.cli.execution import (
    execute_all,
    records_in_words,
    request_of,
    request_options,
)
from celery_idempotent.cli.options import scopes_of
from celery_idempotent.cli.output import Progress, note
from celery_idempotent.cli.session import Session, command, django_part
from celery_idempotent.operations.finding import Filter, pages
from celery_idempotent.records import Record, State

if TYPE_CHECKING:
    from celery_idempotent.django.outbox import Pending

#: So many staged messages are looked for at a time.
_STAGED = 500


def _erase(session: Session, scope: str, **given: object) -> None:
    """Delete all records of a scope, COMPLETED ones included, and its messages in the outbox.

    Every key is looked at, twice: to count, and to erase. It asks in between. What a live owner holds is left alone
    (unless forced), with exit code 1; so is what is claimed meanwhile: run it again until nothing is found. Counters
    know no scope.
    """
    request = request_of("forget", given)
    wanted = Filter(states=frozenset(State), scopes=frozenset(scopes_of(scope)))
    count, namespaces = _count(session, wanted)
    staged = _staged(session, wanted, limit=_STAGED + 1)
    if not count and not staged:
        note(f"Nothing is stored of scope {scope}.")
        return
    plus = "+" if len(staged) > _STAGED else ""
    of = f" of {', '.join(sorted(namespaces))}" if namespaces else ""
    note(
        f"Scope {scope}: {records_in_words(count)}{of},"
        f" {min(len(staged), _STAGED):,}{plus} messages in the outbox."
    )
    note("What took effect is not undone: a call that comes again runs again.")
    request.confirm("Erase all of it?")
    # Before the records: a message that is sent meanwhile would make new ones.
    discarded = _discard(session, wanted)
    if discarded:
        note(f"{discarded:,} staged messages discarded.")
    execute_all(session, request, _records(session, wanted), total=count)


def _count(session: Session, wanted: Filter) -> tuple[int, set[str]]:
    count, namespaces = 0, set[str]()
    with Progress("keys looked at") as progress:
        for page in pages(session.app, session.store, wanted):
            progress.add(page.looked_at)
            count += len(page.records)
            namespaces |= {each.identity.namespace for each in page.records}
    return count, namespaces


def _records(session: Session, wanted: Filter) -> Iterator[Record]:
    """Yield each record once, in as many walks as it takes: one may pass over what moves while others are deleted."""
    seen: set[int] = set()
    while True:
        before = len(seen)
        for page in pages(session.app, session.store, wanted):
            for record in page.records:
                mark = hash((record.identity, record.token))
                if mark not in seen:
                    seen.add(mark)
                    yield record
        if len(seen) == before:
            return


def _staged(session: Session, wanted: Filter, *, limit: int) -> list[Pending]:
    """Return messages of these scopes that wait in the outbox, where there is one."""
    alias, outbox = session.store.outbox_alias, django_part("celery_idempotent.django.outbox")
    if alias is None or outbox is None:
        return []
    found: list[Pending] = outbox.pending(using=alias, limit=limit, scopes=wanted.scopes)
    return found


def _discard(session: Session, wanted: Filter) -> int:
    outbox, count = django_part("celery_idempotent.django.outbox"), 0
    while staged := _staged(session, wanted, limit=_STAGED):
        for each in staged:
            count += outbox.discard(each.id, using=session.store.outbox_alias)
    return count


for _option in reversed(request_options):
    _erase = _option(_erase)

erase_command = command(
    "erase", examples=["erase --scope acme --reason 'contract ended, ticket 4711'"]
)(
    click.option(
        "--scope", required=True, metavar="SCOPE", help="Whose records; `user 17` for HTTP."
    )(_erase)
)
