"""The list of records: by indexes or in bounded steps, and the search for a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from celery_idempotent.celery.finding import (
    LOOK_AT,
    UNFINISHED_AND_FAILED,
    find_key,
    find_task_id,
)
from celery_idempotent.django.admin.forms import FilterForm
from celery_idempotent.records import Page, Record, Selection

if TYPE_CHECKING:
    from celery_idempotent.stores import Store

#: So many records make a page.
PER_PAGE = 50

#: For so many seconds a page looks for a key in every scope.
LOOK_SECONDS = 5.0

#: So many tasks are asked for a key before every scope is searched.
_ASKED = 30


def list_page(store: Store, form: FilterForm, namespaces: Iterable[str]) -> Page:
    """Return the page that a valid form asks for, its newest records first, with all keys seen since the list began.

    A key is looked for at once where it has no scope, and then in every scope. The unfinished and failed records of a
    task with this id are found, too: an index has them.

    Raises:
        ValueError: for a cursor of another list.
    """
    chosen = form.cleaned_data
    selection = form.selection(store.now_ms() if chosen["age"] else 0)
    found: dict[object, Record] = {}
    if chosen["key"] and not chosen["cursor"]:
        known = [selection.namespace] if selection.namespace else list(namespaces)[:_ASKED]
        scopes = selection.scopes or {""}
        unfinished = replace(
            selection, states=UNFINISHED_AND_FAILED, stale=False, keys=frozenset(), before_ms=None
        )
        by_id = find_task_id(store, chosen["key"], unfinished)
        for record in [*find_key(store, known, chosen["key"], scopes), *by_id.records]:
            found[record.identity] = record
    page = _look(store, selection, chosen["cursor"])
    found |= {record.identity: record for record in page.records}
    others = replace(selection, keys=frozenset())  # a task id is no key
    kept = [
        each
        for each in found.values()
        if others.includes(each, page.now_ms) and not _is_over(each, form, page.now_ms)
    ]
    return replace(
        page,
        records=tuple(sorted(kept, key=lambda each: -each.updated_ms)),
        looked_at=(chosen["looked_at"] or 0) + page.looked_at,
    )


def _look(store: Store, selection: Selection, cursor: str) -> Page:
    """Return a page: of a key one that looks at many keys, since few records have it."""
    give_up = monotonic() + LOOK_SECONDS
    looked_at = 0
    while True:
        page = store.list(selection, cursor=cursor, limit=PER_PAGE, look_at=LOOK_AT)
        looked_at, cursor = looked_at + page.looked_at, page.cursor
        if page.records or not cursor or not selection.keys or monotonic() > give_up:
            return replace(page, looked_at=looked_at)


def _is_over(record: Record, form: FilterForm, now_ms: int) -> bool:
    """Is live chosen, and its time over? No store looks for live records alone."""
    return form.cleaned_data["state"] == "live" and (record.deadline_ms or 0) <= now_ms
