"""The admin of idempotency records: its addresses, the list, the record, the charts."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from django.urls import URLPattern, path
from django.utils.http import urlencode

from celery_idempotent.celery.definition import definition_of, definitions
from celery_idempotent.celery.finding import find, look, task_name
from celery_idempotent.celery.operations import ON_MANY, OPERATIONS, offered
from celery_idempotent.celery.story import (
    show_value,
    sweeps_of,
    tell_story,
    time_in_words,
)
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.django.admin import audit
from celery_idempotent.django.admin.base import guarded
from celery_idempotent.django.admin.charts import HOURS, charts
from celery_idempotent.django.admin.forms import FilterForm
from celery_idempotent.django.admin.operations import PER_PAGE, OperationPages, mark_of
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.responses import response_of
from celery_idempotent.django.http.views import view_namespaces
from celery_idempotent.http.answers import CONTENT_TYPE, REPLAYED, read_response
from celery_idempotent.records import Page, Record, Selection, Stored
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import HOUR_MS

if TYPE_CHECKING:
    from celery import Celery
    from django.http import HttpRequest, HttpResponse

#: So many tasks are asked for a key before every scope is searched; so many names of tasks are suggested, and so many
#: tasks have a chart: the busiest.
_ASKED, _SUGGESTED, CHARTS = 30, 200, 50

#: So many seconds the list looks for a key in every scope, and the page of a record for the same key elsewhere.
LOOK_SECONDS, ELSEWHERE_SECONDS = 5.0, 0.2


class ListedRecord(NamedTuple):
    """A line of the list. ``task``: its registered name; ``age``: since the last change."""

    record: Record
    stale: bool
    address: str
    task: str
    age: str
    mark: str


class IdempotencyRecordAdmin(OperationPages):
    """Pages over the records of the app's store. None of them works for longer because there are more records."""

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of the pages, by the names that Django's own pages link to."""
        views: dict[str, tuple[str, Any]] = {
            "changelist": ("", self.list_view),
            "charts": ("charts/", self.charts_view),
            "bulk": ("bulk/", self.bulk_view),
            **{
                each: (
                    f"<path:object_id>/{each}/",
                    functools.partial(self.operation_view, operation=each),
                )
                for each in OPERATIONS
            },
            "change": ("<path:object_id>/change/", self.record_view),
        }
        prefix = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(route, self.admin_site.admin_view(view), name=f"{prefix}_{name}")
            for name, (route, view) in views.items()
        ]

    @guarded("GET")
    def list_view(self, request: HttpRequest) -> HttpResponse:
        """Show the list of records."""
        app, form = celery_app(), FilterForm(request.GET)
        ours = sorted(each.identifier.namespace for each in definitions(app, load=True))
        tasks = list(dict.fromkeys([*view_namespaces(), *ours]))
        page, rows, chosen, more = None, [], {}, ""
        if form.is_valid():
            chosen = form.chosen()
            try:
                page = _list(app, form, tasks)
            except ValueError:
                form.add_error(None, "This place in the list is of another list: start again.")
        if page is not None:
            rows = [self._row(app, each, page.now_ms) for each in page.records]
            if page.cursor:
                place = {"cursor": page.cursor, "looked_at": str(page.looked_at)}
                more = "?" + urlencode({**chosen, **place})
        query = request.GET.urlencode()
        context = {
            "title": "Idempotency records",
            "operations": [
                each for each in ON_MANY if rows and self.may(request, f"{each}_record")
            ],
            "bulk_url": self.address("bulk") + (f"?{query}" if query else ""),
            "form": form,
            "listing": page,
            "rows": rows,
            "more": more,
            "tasks": tasks[:_SUGGESTED],
            "started": bool(request.GET.get("cursor")),
            "restart": "?" + urlencode(chosen),
            "filtered": bool(chosen),
        }
        return self.render(request, "list", context, status=200 if form.is_valid() else 400)

    def _row(self, app: Celery, record: Record, now_ms: int) -> ListedRecord:
        return ListedRecord(
            record=record,
            stale=record.stale(now_ms),
            address=self.address_of(record.identity),
            task=task_name(app, record.identity),
            age=time_in_words(max(now_ms - record.updated_ms, 0)),
            mark=mark_of(record),
        )

    @guarded("GET")
    def record_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show one record; nothing can be changed here."""
        app, identity = celery_app(), self.identity_of(object_id)
        store = get_store(app)
        record = store.get(identity) if identity else None
        if identity is None or record is None:
            return self.gone(request, identity)
        may_see = self.may(request, "view_result")
        of_view = record.value is not None and record.value.content_type == CONTENT_TYPE
        read = _read_response if of_view else None
        same_key = Selection(keys=frozenset({identity.key}))
        others = look(store, same_key, seconds=ELSEWHERE_SECONDS)
        context = {
            "title": "Idempotency record",
            "subtitle": str(identity),
            "story": tell_story(app, store, record, errors=may_see),
            "record": record,
            "stale": record.stale(others.now_ms),
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            "steps": [(name, len(stored.body)) for name, stored in record.steps],
            "identity": identity,
            "task": task_name(app, identity),
            "known": definition_of(app, identity.namespace, load=True) is not None,
            "of_view": identity.namespace in view_namespaces(),
            "may_see": may_see,
            "value": show_value(app, record, read) if may_see and record.state.settled else None,
            "buttons": [
                (each, self.address_of(identity, each))
                for each in offered(app, record)
                if self.may(request, f"{each}_record")
            ],
            "elsewhere": [
                self._row(app, each, others.now_ms)
                for each in others.records
                if each.identity != identity
            ],
            "search_url": others.cursor
            and f"{self.address('changelist')}?{urlencode({'key': identity.key})}",
            "log": audit.log_entries(identity),
        }
        return self.render(request, "record", context)

    @guarded("GET")
    def charts_view(self, request: HttpRequest) -> HttpResponse:
        """Show outcomes by task and hour, and whether sweeps run."""
        app = celery_app()
        store = get_store(app)
        stats = store.stats()
        counted = [each for each in store.counts(hours=HOURS) if each.task != SWEEP]
        drawn = charts(counted, last_hour=stats.now_ms // HOUR_MS)
        names = ("live", "stale", "interrupted", "failed")
        context = {
            "title": "Outcomes of the last 24 hours",
            "states": [(name, stats.said(name)) for name in names],  # type: ignore[arg-type]  # they are
            "sweeps": sweeps_of(app, store, stats)[1],
            "counts": store.supports_counting,
            "charts": drawn[:CHARTS],
            "further": len(drawn[CHARTS:]),
        }
        return self.render(request, "charts", context)


def _list(app: Celery, form: FilterForm, namespaces: list[str]) -> Page:
    """Return the page that a valid form asks for, its newest records first, with all keys seen since the list began.

    Raises:
        ValueError: for a cursor of another list.
    """
    store, chosen = get_store(app), form.cleaned_data
    selection = form.selection(app, store)
    page = look(
        store,
        selection,
        cursor=chosen["cursor"],
        limit=PER_PAGE,
        enough=1 if selection.keys else 0,  # few records have a key
        seconds=LOOK_SECONDS,
    )
    records = list(page.records)
    if chosen["key"] and not chosen["cursor"]:
        records += find(store, chosen["key"], selection, namespaces[:_ASKED])
    others = replace(selection, keys=frozenset())  # a task id is no key
    over = page.now_ms if chosen["state"] == "live" else -1  # no store looks for live records alone
    kept = {
        each.identity: each
        for each in records
        if others.includes(each, page.now_ms)
        and (each.deadline_ms is None or each.deadline_ms > over)
    }
    newest = sorted(kept.values(), key=lambda each: -each.updated_ms)
    looked_at = (chosen["looked_at"] or 0) + page.looked_at
    return replace(page, records=tuple(newest), looked_at=looked_at)


def _read_response(stored: Stored) -> str:
    """Return the answer of a view, its body if that is a text."""
    response = response_of(read_response(stored))
    del response[REPLAYED]
    body = f"({len(response.content):,} bytes that are no text)"
    if "Content-Encoding" not in response:
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            body = response.content.decode(response.charset)
    head = [f"{response.status_code} {response.reason_phrase}"]
    head += [f"{name}: {value}" for name, value in response.items()]
    return "\n".join([*head, "", body])
