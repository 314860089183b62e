"""The admin of idempotency records: its addresses, the list, the record, the dashboard, the outbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from django.urls import URLPattern, path
from django.utils.http import urlencode

from celery_idempotent.celery.operations import ON_MANY, OPERATIONS, offered
from celery_idempotent.celery.registry import definition_of, namespaces
from celery_idempotent.django.admin import audit
from celery_idempotent.django.admin.base import guarded
from celery_idempotent.django.admin.bulk import BulkPages
from celery_idempotent.django.admin.dashboard import board
from celery_idempotent.django.admin.detail import detail
from celery_idempotent.django.admin.forms import FilterForm, PeriodForm
from celery_idempotent.django.admin.listing import list_page, search
from celery_idempotent.django.admin.operations import Mark
from celery_idempotent.django.admin.results import result_of
from celery_idempotent.django.admin.values import shown_with_responses
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.views import view_namespaces
from celery_idempotent.django.outbox import pending
from celery_idempotent.operations.explaining import story_of
from celery_idempotent.operations.finding import task_name
from celery_idempotent.operations.values import error_name
from celery_idempotent.operations.wording import time_in_words
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from django.http import HttpRequest, HttpResponse

    from celery_idempotent.records import Record
    from celery_idempotent.stores import Store

#: So many messages of the outbox are shown, and so many names of tasks suggested.
_STAGED, _SUGGESTED = 100, 200

#: After so many seconds a page looks again; a list does so only if it looked at few keys.
_RECORD_EVERY, _LIST_EVERY, _DASHBOARD_EVERY, _CHEAP = 10, 15, 30, 1000


class ListedRecord(NamedTuple):
    """A line of the list. ``task``: its registered name; ``age``: since the last change; ``error``: of a failure."""

    record: Record
    stale: bool
    address: str
    task: str
    age: str
    error: str
    mark: Mark


class IdempotencyRecordAdmin(BulkPages):
    """Pages over the records of the app's store. None of them works for longer because there are more records."""

    # -- addresses

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of the pages, by the names that Django's own pages link to."""
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        wrap = self.admin_site.admin_view
        return [
            path("", wrap(self.changelist_view), name=f"{name}_changelist"),
            path("dashboard/", wrap(self.dashboard_view), name=f"{name}_dashboard"),
            path("outbox/", wrap(self.outbox_view), name=f"{name}_outbox"),
            path("bulk/", wrap(self.bulk_view), name=f"{name}_bulk"),
            path("<path:object_id>/result/", wrap(self.result_view), name=f"{name}_result"),
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

    # -- pages

    @guarded("GET")
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        """Show the list of records."""
        app = celery_app()
        store, tasks = get_store(app), _known_namespaces(app)
        form = FilterForm(request.GET)
        listing, rows, more, errors = None, [], "", False
        if form.is_valid():
            try:
                listing = (
                    search(store, form, tasks)
                    if form.cleaned_data["key"]
                    else list_page(store, form)
                )
            except ValueError:
                form.add_error(None, "This place in the list is of another list: start again.")
        if listing is not None:
            errors = form.cleaned_data["state"] == "FAILED" and self.may(request, "view_result")
            rows = [
                self._row(app, store, each, listing.now_ms, errors=errors)
                for each in listing.records
            ]
            if listing.cursor:
                place = {"cursor": listing.cursor, "looked_at": str(listing.looked_at)}
                more = "?" + urlencode({**form.chosen(), **place})
        query = request.GET.urlencode()
        context = {
            "title": "Idempotency records",
            "operations": [
                (each, WORDINGS[each].button)
                for each in ON_MANY
                if rows and self.may(request, f"{each}_record")
            ],
            "every_match": bool(rows and more and form.chosen() and not form.cleaned_data["key"]),
            "bulk_url": self.address("bulk") + (f"?{query}" if query else ""),
            "form": form,
            "listing": listing,
            "rows": rows,
            "more": more,
            "tasks": tasks[:_SUGGESTED],
            "errors": errors,
            "every": _LIST_EVERY if listing and listing.looked_at <= _CHEAP else 0,
            "started": bool(request.GET.get("cursor")),
            "restart": "?" + urlencode(form.chosen()) if form.is_valid() else "?",
            "filtered": form.is_valid() and bool(form.chosen()),
            **(extra_context or {}),
        }
        return self.render(request, "list", context, status=200 if form.is_valid() else 400)

    def _row(
        self, app: Celery, store: Store, record: Record, now_ms: int, *, errors: bool
    ) -> ListedRecord:
        """Return a line of the list; only for the name of an error the store is asked again."""
        whole = store.get(record.identity) if errors else None
        return ListedRecord(
            record=record,
            stale=record.stale(now_ms),
            address=self.address_of(record.identity),
            task=task_name(app, record.identity),
            age=time_in_words(max(now_ms - record.updated_ms, 0)),
            error="" if whole is None else error_name(app, whole),
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
        definition = definition_of(app, identity.namespace, load=True)
        about = detail(record, store.now_ms(), known=definition is not None)
        may_see = self.may(request, "view_result")
        buttons = [
            (WORDINGS[each].button, self.address_of(identity, each), each)
            for each in about.operations
            if self.may(request, f"{each}_record")
        ]
        context = {
            "title": "Idempotency record",
            "every": _RECORD_EVERY,
            "subtitle": str(identity),
            "detail": about,
            "story": story_of(app, store, record, errors=may_see),
            "record": record,
            "identity": identity,
            "task": task_name(app, identity),
            "known": definition is not None,
            "of_view": identity.namespace in view_namespaces(),
            "may_see": may_see,
            "value": shown_with_responses(app, record)
            if may_see and record.state.settled
            else None,
            "buttons": buttons,
            "forget_step_url": self._forget_step_url(request, record),
            "result_url": self.address_of(identity, "result"),
            "log": audit.log_entries(identity),
            **(extra_context or {}),
        }
        return self.render(request, "record", context)

    def _forget_step_url(self, request: HttpRequest, record: Record) -> str:
        """Return where a step is forgotten, less its name; ``""`` where it cannot be, or not by this person."""
        forgettable = any("forget" in offered(record, step=name) for name, _ in record.steps)
        if not forgettable or not self.may(request, "forget_record"):
            return ""
        return f"{self.address_of(record.identity, 'forget')}?step="

    @guarded("GET")
    def result_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show what the result backend says about the task of a record."""
        identity = self.identity_of(object_id)
        app = celery_app()
        record = None if identity is None else get_store(app).get(identity)
        if identity is None or record is None or not record.task_id:
            return self.gone(request, identity)
        may_see = self.may(request, "view_result")
        context = {
            "title": "Result backend",
            "identity": identity,
            "task_id": record.task_id,
            "may_see": may_see,
            "result": result_of(app, record.task_id, may_see=may_see),
            "back": self.address_of(identity),
        }
        return self.render(request, "result", context)

    @guarded("GET")
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show how things are."""
        app = celery_app()
        form = PeriodForm(request.GET)
        valid = form.is_valid()
        chosen: Mapping[str, str] = form.cleaned_data if valid else {"period": "", "task": ""}
        about = board(app, period=chosen["period"] or "24h", task=chosen["task"])
        oldest = None if about.oldest is None else self.address_of(about.oldest.identity)
        context = {
            "title": "Idempotency dashboard",
            "every": _DASHBOARD_EVERY,
            "form": form,
            "board": about,
            "oldest_url": oldest,
            "tasks": namespaces(app)[:_SUGGESTED],
        }
        return self.render(request, "dashboard", context, status=200 if valid else 400)

    @guarded("GET")
    def outbox_view(self, request: HttpRequest) -> HttpResponse:
        """Show the messages that are committed and not sent."""
        alias = _outbox_alias()
        waiting = [] if alias is None else pending(using=alias, limit=_STAGED + 1)
        rows = [(each, time_in_words(each.age_ms)) for each in waiting[:_STAGED]]
        context = {
            "title": "Outbox",
            "alias": alias,
            "rows": rows,
            "more": len(waiting) > _STAGED,
        }
        return self.render(request, "outbox", context)

    def render(
        self, request: HttpRequest, page: str, context: Mapping[str, object], *, status: int = 200
    ) -> HttpResponse:
        """Return a page with the ways to the other pages."""
        ways = {
            "list_url": self.address("changelist"),
            "dashboard_url": self.address("dashboard"),
            "outbox_url": self.address("outbox"),
        }
        return super().render(request, page, {**ways, **context}, status=status)


def _known_namespaces(app: Celery) -> list[str]:
    """Return what keys may be for: views, of which there are few, and tasks."""
    return list(dict.fromkeys([*view_namespaces(), *namespaces(app)]))


def _outbox_alias() -> str | None:
    """Return the database whose outbox the app's store looks after."""
    return get_store(celery_app()).outbox_alias
