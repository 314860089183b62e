"""The admin of idempotency records: its addresses, the list, the record, the charts."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, NamedTuple

from django.urls import URLPattern, path
from django.utils.http import urlencode

from celery_idempotent.celery.finding import find_key_anywhere, task_name
from celery_idempotent.celery.operations import ON_MANY, OPERATIONS, offered
from celery_idempotent.celery.registry import definition_of, namespaces
from celery_idempotent.celery.story import (
    Shown,
    is_too_large,
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
from celery_idempotent.django.admin.listing import list_page
from celery_idempotent.django.admin.operations import Mark, OperationPages
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.messages import read_response
from celery_idempotent.django.http.views import view_namespaces
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.http.responses import CONTENT_TYPE, REPLAYED
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import HOUR_MS

if TYPE_CHECKING:
    from celery import Celery
    from django.http import HttpRequest, HttpResponse

#: So many names of tasks are suggested, and so many tasks have a chart: the busiest.
_SUGGESTED, CHARTS = 200, 50

#: So many seconds the page of a record looks for the same key elsewhere.
ELSEWHERE_SECONDS = 0.2


class ListedRecord(NamedTuple):
    """A line of the list. ``task``: its registered name; ``age``: since the last change."""

    record: Record
    stale: bool
    address: str
    task: str
    age: str
    mark: Mark


class IdempotencyRecordAdmin(OperationPages):
    """Pages over the records of the app's store. None of them works for longer because there are more records."""

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of the pages, by the names that Django's own pages link to."""
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        wrap = self.admin_site.admin_view
        return [
            path("", wrap(self.changelist_view), name=f"{name}_changelist"),
            path("charts/", wrap(self.charts_view), name=f"{name}_charts"),
            path("bulk/", wrap(self.bulk_view), name=f"{name}_bulk"),
            *(
                path(
                    f"<path:object_id>/{operation}/",
                    wrap(functools.partial(self.operation_view, operation=operation)),
                    name=f"{name}_{operation}",
                )
                for operation in OPERATIONS
            ),
            path("<path:object_id>/change/", wrap(self.change_view), name=f"{name}_change"),
        ]

    @guarded("GET")
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        """Show the list of records."""
        app = celery_app()
        tasks = _known_namespaces(app)
        form = FilterForm(request.GET)
        listing, more, rows = None, "", []
        if form.is_valid():
            try:
                listing = list_page(get_store(app), form, tasks)
            except ValueError:
                form.add_error(None, "This place in the list is of another list: start again.")
        if listing is not None:
            rows = [self._row(app, each, listing.now_ms) for each in listing.records]
            if listing.cursor:
                place = {"cursor": listing.cursor, "looked_at": str(listing.looked_at)}
                more = "?" + urlencode({**form.chosen(), **place})
        query = request.GET.urlencode()
        context = {
            "title": "Idempotency records",
            "operations": [
                each for each in ON_MANY if rows and self.may(request, f"{each}_record")
            ],
            "bulk_url": self.address("bulk") + (f"?{query}" if query else ""),
            "form": form,
            "listing": listing,
            "rows": rows,
            "more": more,
            "tasks": tasks[:_SUGGESTED],
            "started": bool(request.GET.get("cursor")),
            "restart": "?" + urlencode(form.chosen()) if form.is_valid() else "?",
            "filtered": form.is_valid() and bool(form.chosen()),
            **(extra_context or {}),
        }
        return self.render(request, "list", context, status=200 if form.is_valid() else 400)

    def _row(self, app: Celery, record: Record, now_ms: int) -> ListedRecord:
        return ListedRecord(
            record=record,
            stale=record.stale(now_ms),
            address=self.address_of(record.identity),
            task=task_name(app, record.identity),
            age=time_in_words(max(now_ms - record.updated_ms, 0)),
            mark=Mark.of(record),
        )

    @guarded("GET")
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",  # noqa: ARG002
        extra_context: dict[str, object] | None = None,
    ) -> HttpResponse:
        """Show one record; nothing can be changed here."""
        identity = self.identity_of(object_id)
        if identity is None:
            return self.gone(request, None)
        app = celery_app()
        store = get_store(app)
        record = store.get(identity)
        if record is None:
            return self.gone(request, identity)
        known = definition_of(app, identity.namespace, load=True) is not None
        may_see = self.may(request, "view_result")
        others = find_key_anywhere(store, [identity.key], seconds=ELSEWHERE_SECONDS)
        now_ms = store.now_ms()
        context = {
            "title": "Idempotency record",
            "subtitle": str(identity),
            "story": tell_story(app, store, record, errors=may_see),
            "record": record,
            "stale": record.stale(now_ms),
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            "steps": [(name, len(stored.body)) for name, stored in record.steps],
            "identity": identity,
            "task": task_name(app, identity),
            "known": known,
            "of_view": identity.namespace in view_namespaces(),
            "may_see": may_see,
            "value": _show_value(app, record) if may_see and record.state.settled else None,
            "buttons": [
                (each, self.address_of(identity, each))
                for each in offered(record, known=known)
                if self.may(request, f"{each}_record")
            ],
            "elsewhere": [
                self._row(app, each, now_ms) for each in others.records if each.identity != identity
            ],
            "search_url": others.cut
            and f"{self.address('changelist')}?{urlencode({'key': identity.key})}",
            "log": audit.log_entries(identity),
            **(extra_context or {}),
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
            "sweeps": sweeps_of(app, store, stats).sentence,
            "counts": store.supports_counting,
            "charts": drawn[:CHARTS],
            "further": len(drawn[CHARTS:]),
        }
        return self.render(request, "charts", context)


def _known_namespaces(app: Celery) -> list[str]:
    """Return what keys may be for: views, of which there are few, and tasks."""
    return list(dict.fromkeys([*view_namespaces(), *namespaces(app)]))


def _show_value(app: Celery, record: Record) -> Shown:
    """Return what a settled record says: its result, its error, or its view's answer, the body if that is a text."""
    stored = record.value
    if stored is None or stored.content_type != CONTENT_TYPE or is_too_large(stored):
        return show_value(app, record)
    try:
        response = read_response(stored)
    except ResultUnavailable as unavailable:
        return Shown(trouble=str(unavailable))
    del response[REPLAYED]
    body = f"({len(response.content):,} bytes that are no text)"
    if "Content-Encoding" not in response:
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            body = response.content.decode(response.charset)
    head = [f"{response.status_code} {response.reason_phrase}"]
    head += [f"{name}: {value}" for name, value in response.items()]
    return Shown.of("\n".join([*head, "", body]))
