"""The list of records: filters through indexes or in bounded steps, and the search for one key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from celery_idempotent.django.admin.forms import FilterForm
from celery_idempotent.operations.finding import UNFINISHED_AND_FAILED, spellings
from celery_idempotent.records import Identity, Page, Record, Selection, State

if TYPE_CHECKING:
    from celery_idempotent.stores import Store

#: So many records make a page, and for them so many keys are looked at.
PER_PAGE, LOOK_AT = 50, 5000

#: For so many seconds all that a filter means is looked for.
_LOOK_SECONDS = 10.0

#: In so many tasks a key is searched for if none is named.
SEARCHED = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A page of records. ``cursor`` asks for the next one; ``looked_at`` keys were seen since the list began.

    ``left`` records follow, or more than that: so many keys were looked at ahead. ``unsearched``: so many tasks were
    not searched for the key. ``cut``: there were too many unfinished and failed records to look at each of them for a
    task id.
    """

    records: tuple[Record, ...]
    now_ms: int
    cursor: str = ""
    looked_at: int = 0
    left: int = 0
    left_or_more: bool = False
    unsearched: int = 0
    cut: bool = False


def list_page(store: Store, form: FilterForm) -> Listing:
    """Return the page that a valid form asks for, the newest of the page first.

    Raises:
        ValueError: for a cursor of another list.
    """
    aged = bool(form.cleaned_data["age"])
    selection = form.selection(store.now_ms() if aged else 0)
    page = store.list(
        selection,
        cursor=form.cleaned_data["cursor"],
        limit=PER_PAGE,
        look_at=LOOK_AT,
    )
    before = form.cleaned_data["looked_at"] or 0
    left, further = 0, ""
    if page.cursor:
        ahead = store.list(selection, cursor=page.cursor, limit=LOOK_AT, look_at=LOOK_AT)
        left, further = len(_meant(ahead, form)), ahead.cursor
    return Listing(
        records=tuple(sorted(_meant(page, form), key=lambda each: -each.updated_ms)),
        now_ms=page.now_ms,
        cursor=page.cursor,
        looked_at=before + page.looked_at,
        left=left,
        left_or_more=bool(further),
    )


def looked_through(store: Store, form: FilterForm) -> Iterator[Page]:
    """Yield page after page of all that a valid form means, for some seconds; the last one may have a cursor."""
    selection, cursor = form.selection(store.now_ms()), ""
    give_up = monotonic() + _LOOK_SECONDS
    while True:
        page = store.list(selection, cursor=cursor, limit=LOOK_AT, look_at=LOOK_AT)
        yield replace(page, records=tuple(_meant(page, form)))
        cursor = page.cursor
        if not cursor or monotonic() > give_up:
            return


def _meant(page: Page, form: FilterForm) -> list[Record]:
    """Return those of a page that are wanted: no store looks for what is live alone."""
    live = form.cleaned_data["state"] == "live"
    return [each for each in page.records if not live or (each.deadline_ms or 0) > page.now_ms]


def search(store: Store, form: FilterForm, namespaces: Iterable[str]) -> Listing:
    """Return the records whose key is what was typed, or whose key or owner is that task id.

    A key is found by its whole identity: in the task and the scope that are named, else in every task of the app, as
    far as there are not too many, and the namespaces of views, and without a scope. A task id is looked for among the
    unfinished and failed records, which an index finds; nothing finds those of a task that completed.
    """
    text, task = form.cleaned_data["key"], form.cleaned_data["task"]
    known = [task] if task else list(namespaces)
    found = [
        record
        for namespace in known[:SEARCHED]
        for key in spellings(text)
        if (
            record := store.get(
                Identity(namespace=namespace, scope=form.cleaned_data["scope"], key=key)
            )
        )
    ]
    owned = store.list(
        Selection(
            states=UNFINISHED_AND_FAILED,
            namespace=task or None,
            scope=form.cleaned_data["scope"] or None,
        ),
        limit=LOOK_AT,
        look_at=LOOK_AT,
    )
    keys = {record.identity for record in found}
    found += [r for r in owned.records if r.task_id == text and r.identity not in keys]
    selection = form.selection(owned.now_ms)
    return Listing(
        records=tuple(record for record in found if selection.includes(record, owned.now_ms)),
        now_ms=owned.now_ms,
        unsearched=max(len(known) - SEARCHED, 0),
        cut=bool(owned.cursor),
    )


def oldest_processing(store: Store) -> tuple[Record | None, bool]:
    """Return the claim that has been held for longest, and whether there were too many to look at all of them."""
    page = store.list(
        Selection(states=frozenset({State.PROCESSING})), limit=LOOK_AT, look_at=LOOK_AT
    )
    oldest = min(page.records, key=lambda record: record.updated_ms, default=None)
    return oldest, bool(page.cursor)
