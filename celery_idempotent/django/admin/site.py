"""The admin of idempotency records: a first page, the list, the record, and operations on one record or several.

Nothing is stored between the pages: a form carries the marks of the records (key, token, state), so that each record is
operated on only if it is still as it was shown.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode

from celery_idempotent.celery import finding, operations, story
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.celery.operations import OPERATIONS, Operation, OperationRequest, Outcome
from celery_idempotent.django.admin import audit, overview
from celery_idempotent.django.admin.forms import FilterForm, OperationForm
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import HTTP_NAMESPACE, Identity, Page, Record, Selection, State
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import HOUR, MINUTE

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: The records of a page, the most of one operation, and those of each table of the first page.
PER_PAGE, MOST, FIRST = 50, 500, 8

_ENDED_BADLY = frozenset({State.INTERRUPTED, State.FAILED})

#: The most namespaces in which a key is looked up directly, and the most that the filter suggests.
_ASKED, _SUGGESTED = 30, 200

#: The seconds of a search for a key in every scope, in the list and for the page of a record.
LOOK_SECONDS, ELSEWHERE_SECONDS = 5.0, 0.2

#: What the question about an operation says of each record, in this order.
_VERDICTS: dict[operations.Verdict, str] = {
    "apply": "Will be {0.done}.",
    "held": "Left alone unless forced: its owner is live.",
    "skip": "Left alone: {0.refusal}",
}


class Row(NamedTuple):
    """A record in a list; ``verdict`` and ``text`` are those of an operation."""

    record: Record
    cells: Mapping[str, object]
    address: str
    mark: str
    verdict: operations.Verdict | None = None
    text: str = ""

    @property
    def details(self) -> Sequence[tuple[str, object]]:
        """The cells after key and state, by name."""
        return [*self.cells.items()][2:]


class IdempotencyRecordAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic only in the stubs
    """Pages over the records of the app's store. The work for a page is bounded, however many records there are.

    Tasks make the records, and operations change them.
    """

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Whether the user may see records."""
        return self._may(request, "view_idempotencyrecord")

    def _nobody(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        return False

    has_add_permission = has_change_permission = has_delete_permission = _nobody
    has_module_permission = has_view_permission

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of the pages, by the names that Django's own pages link to."""
        views: dict[str, tuple[str, Callable[..., HttpResponse]]] = {
            "changelist": ("", self.overview_view),
            "list": ("records/", self.list_view),
            "operation": ("operation/", self.operation_view),
            "change": ("<path:object_id>/change/", self.record_view),
        }
        prefix = f"{self.opts.app_label}_{self.opts.model_name}"
        guard = self.admin_site.admin_view
        return [
            path(route, guard(partial(self._serve, view)), name=f"{prefix}_{name}")
            for name, (route, view) in views.items()
        ]

    def _serve(
        self, view: Callable[..., HttpResponse], request: HttpRequest, **kwargs: str
    ) -> HttpResponse:
        """Show a page to those who may see records; if the store does not answer, say so."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            return view(request, **kwargs)
        except IdempotencyError as error:
            logger.warning("idempotency: a page of the admin cannot be shown: %s", error)
            context = {"title": "The store cannot be used at the moment", "trouble": str(error)}
            return self._render(request, "message", context, status=503)

    def _may(self, request: HttpRequest, permission: str) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.{permission}")

    def _address(self, page: str, *args: str, **query: str) -> str:
        name = f"{self.opts.app_label}_{self.opts.model_name}_{page}"
        url = reverse(f"{self.admin_site.name}:{name}", args=args)
        return f"{url}?{urlencode(query)}" if query else url

    def _address_of(self, identity: Identity) -> str:
        return self._address("change", quote(audit.unparse(identity)))

    def _render(
        self, request: HttpRequest, page: str, context: Mapping[str, object], *, status: int = 200
    ) -> HttpResponse:
        """Return a page in the look of the admin."""
        # So that {% url 'admin:index' %} leads to this site, whatever its name.
        vars(request)["current_app"] = self.admin_site.name
        about = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "overview_url": self._address("changelist"),
            "list_url": self._address("list"),
            **context,
        }
        template = f"admin/celery_idempotent/idempotencyrecord/{page}.html"
        return TemplateResponse(request, template, about, status=status)

    def _row(self, app: Celery, record: Record, now_ms: int, *, errors: bool = False) -> Row:
        return Row(
            record=record,
            cells=story.cells(app, record, now_ms, errors=errors),
            address=self._address_of(record.identity),
            mark=mark_of(record),
        )

    def overview_view(self, request: HttpRequest) -> HttpResponse:
        """Show totals, what is in trouble, and the outcomes of the last hour by minute, or of ``?hours=24``."""
        app, by_hour = celery_app(), request.GET.get("hours") == "24"
        store, errors = get_store(app), self._may(request, "view_result")
        stats = store.stats()
        counted = store.counts(hours=24) if by_hour else store.counts(minutes=60)
        period, times = (HOUR, 24) if by_hour else (MINUTE, 60)
        selections = {"Failed and interrupted, the newest first": Selection(states=_ENDED_BADLY)}
        if stats.stale:  # as a rule a sweep has ended them
            selections["Stale: the lease ran out"] = Selection(stale=True)
        else:
            selections["Live: queued or running"] = Selection(live=True)
        context = {
            "title": "Idempotency",
            "totals": {
                "live": stats.live,
                "stale": stats.stale,
                **({} if stats.queued is None else {"QUEUED": stats.queued}),
                "INTERRUPTED": stats.interrupted,
                "FAILED": stats.failed,
            },
            "stats": stats,
            "sweeps": story.sweeps_of(app, store, stats),
            "tables": {
                title: [self._row(app, each, page.now_ms, errors=errors) for each in page.records]
                for title, selection in selections.items()
                for page in [store.list(selection, limit=FIRST)]
            },
            "errors": overview.errors(counted),
            "chart": overview.chart(counted, period, times, stats.now_ms),
            "by_hour": by_hour,
            "counts": store.supports_counting,
        }
        return self._render(request, "overview", context)

    def list_view(self, request: HttpRequest) -> HttpResponse:
        """Show the list of records."""
        app, form = celery_app(), FilterForm(request.GET)
        tasks = finding.namespaces(app)
        page, rows, chosen, more = None, [], {}, ""
        if form.is_valid():
            chosen = form.chosen()
            try:
                selection = finding.select(app, get_store(app), chosen)
                page = _list(app, form, selection, tasks)
            except ValueError:
                form.add_error(None, "This page belongs to another list: start at the first page.")
        if page is not None:
            errors = self._may(request, "view_result")
            rows = [self._row(app, each, page.now_ms, errors=errors) for each in page.records]
            more = page.cursor and "?" + urlencode({**chosen, "cursor": page.cursor})
        is_absent = [*chosen] == ["key"] and not (rows or more)
        context = {
            "title": "Idempotency records",
            "operations": [n for n in operations.ON_MANY if self._may(request, f"{n}_record")],
            "operation_url": self._address("operation", **request.GET.dict()),
            "form": form,
            "chosen": chosen,
            "listing": page,
            "rows": rows,
            "more": more,
            "most": MOST,
            "newest": page and selection.wanted <= _ENDED_BADLY,
            "tasks": tasks[:_SUGGESTED],
            "story": story.tell_absence(app, chosen["key"]) if is_absent else None,
        }
        return self._render(request, "list", context, status=200 if form.is_valid() else 400)

    def record_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show one record, with the operations that apply to it."""
        app, identity = celery_app(), None
        with contextlib.suppress(ValueError):
            identity = audit.parse(unquote(object_id))
        store = get_store(app)
        record = store.get(identity) if identity else None
        if identity is None or record is None:
            missing: dict[str, object] = {
                "title": "No such record",
                "story": story.tell_absence(app, str(identity)) if identity else None,
                "log": audit.log_entries(identity) if identity else [],
            }
            return self._render(request, "message", missing, status=404)
        may_see = self._may(request, "view_result")
        value = story.show_value(app, record) if may_see and not record.deadline_ms else ""
        same_key = finding.select(app, store, {"key": identity.key})
        others = finding.look(store, same_key, seconds=ELSEWHERE_SECONDS)
        elsewhere = [each for each in others.records if each.identity != identity]
        context = {
            "title": "Idempotency record",
            "subtitle": str(identity),
            "story": story.tell_story(app, store, record),
            "row": self._row(app, record, others.now_ms),
            "record": record,
            "identity": identity,
            "known": definition_of(app, identity.namespace, load=True) is not None,
            "of_view": identity.namespace == HTTP_NAMESPACE,
            "may_see": may_see,
            "value": value,
            "error": record.error if may_see else "",
            "operations": [
                each
                for each in operations.offered(app, record)
                if self._may(request, f"{each}_record")
            ],
            "operation_url": self._address("operation", one="1"),
            "elsewhere": [self._row(app, each, others.now_ms) for each in elsewhere],
            "others": others,
            "log": audit.log_entries(identity),
        }
        return self._render(request, "record", context)

    def operation_view(self, request: HttpRequest) -> HttpResponse:
        """Ask about an operation on ``one`` record, or on those ticked in the list; execute it once confirmed."""
        post, back = request.POST, self._address("list", **request.GET.dict())
        marks = _read_marks(post.getlist("record"))
        if marks and request.GET.get("one"):
            back = self._address_of(marks[0].identity)
        if request.method == "GET":
            return HttpResponseRedirect(back)  # after a login in between
        app, form = celery_app(), FilterForm(request.GET)
        if post.get("all") and form.is_valid():
            selection = finding.select(app, store := get_store(app), form.chosen())
            found = finding.look(store, selection, enough=MOST, seconds=LOOK_SECONDS)
            marks = list(found.records[:MOST])
            if found.cursor or len(found.records) > MOST:
                text = f"Only the first {MOST:,} are selected: do it again for the rest."
                messages.warning(request, text)
        operation = next((each for each in OPERATIONS if each == post.get("operation")), None)
        if operation is None:
            return _back_with(request, back, "No action selected. Nothing was done.")
        if not self._may(request, f"{operation}_record"):
            raise PermissionDenied
        if not marks:
            return _back_with(request, back, "No record selected. Nothing was done.")
        most = MOST if operation in operations.ON_MANY else 1
        if len(marks) > most:
            return _back_with(request, back, f"Select at most {most:,} records.")
        if not post.get("confirmed"):
            return self._question(request, operation, marks, back)
        answer = OperationForm(operation, marks[0], post, live=True)
        if not answer.is_valid():
            return self._question(request, operation, marks, back, answer)
        _execute(request, operation, marks, answer.cleaned_data)
        return HttpResponseRedirect(back)

    def _question(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: Sequence[Record],
        back: str,
        form: OperationForm | None = None,
    ) -> HttpResponse:
        """Ask for a confirmation, records that will change first; ``form``: the answer, if it has errors."""
        app = celery_app()
        now_ms = get_store(app).now_ms()
        rows = [self._plan(app, operation, each, now_ms) for each in marks]
        apply, held, skip = ([row for row in rows if row.verdict == each] for each in _VERDICTS)
        if len(rows) == len(skip) == 1:
            return _back_with(request, back, f"Nothing was done. {rows[0].text}")
        chosen = [row.record for row in (*apply, *held)]
        context = {
            "title": f"{operation.capitalize()}: are you sure?",
            "operation": operation,
            "effect": OPERATIONS[operation].effect,
            "risks": story.risks(app, operation, chosen, now_ms),
            "back": back,
            "rows": [*apply, *held, *skip][:PER_PAGE],
            "marks": "\n".join(mark_of(record) for record in chosen),
            "total": len(rows),
            "doing": len(apply),
            "live": len(held),
            "left": len(skip),
            "one": len(rows) == 1,
            "form": form or OperationForm(operation, marks[0], live=bool(held)),
        }
        return self._render(request, "operation", context, status=400 if form else 200)

    def _plan(self, app: Celery, operation: Operation, seen: Record, now_ms: int) -> Row:
        """Return the row of a record, with what the operation would do to it."""
        record, found = get_store(app).get(seen.identity), None
        if record is None:
            text = "Left alone: there is no such record any more."
        elif mark_of(record) != mark_of(seen):
            text = "Left alone: it has changed since it was shown."
        else:
            found = operations.verdict(app, operation, record, now_ms)
            text = _VERDICTS[found].format(OPERATIONS[operation])
        return self._row(app, record or seen, now_ms)._replace(verdict=found or "skip", text=text)


def mark_of(record: Record) -> str:
    """Return the value of a record's box in the list: if token or state have changed, it is left alone."""
    return f"{record.token} {record.state.value} {audit.unparse(record.identity)}"


def _read_marks(texts: Iterable[str]) -> list[Record]:
    """Return the records of these marks, as they were shown, each once."""
    found: dict[Identity, Record] = {}
    try:
        for text in (line for each in texts for line in each.splitlines() or [""]):
            token, state, name = text.split(" ", 2)
            if not (token.isascii() and token.isdecimal() and len(token) < 20):
                raise ValueError("no token")
            about: dict[str, Any] = {"state": State(state), "token": int(token)}
            seen = Record(identity=audit.parse(name), created_ms=0, updated_ms=0, **about)
            found[seen.identity] = seen
    except ValueError as error:
        raise BadRequest("This record is not in the list.") from error
    return list(found.values())


def _execute(
    request: HttpRequest, operation: Operation, marks: Sequence[Record], given: Mapping[str, Any]
) -> None:
    """Change one record after the other, while the store answers, with a message for each outcome."""
    wanted = OperationRequest(operation, who=request.user.get_username(), **given)
    done, left, untried = [], dict[str, list[Identity]](), len(marks)
    for mark, outcome, text in operations.operate_on_each(celery_app(), wanted, marks):
        untried -= 1
        if outcome is Outcome.DONE:
            done.append(mark.identity)
        else:
            left.setdefault(text, []).append(mark.identity)
    for text, identities in left.items():
        others = f" and {len(identities) - 1:,} more" if len(identities) > 1 else ""
        level = messages.WARNING if text == Outcome.UNSENT.value else messages.ERROR
        messages.add_message(request, level, f"{text} ({identities[0]}{others})")
    if done:
        which = f"{len(done)} of {len(marks)}" if len(marks) > 1 else done[0]
        messages.success(request, f"{OPERATIONS[operation].done.capitalize()}: {which}.")
    if untried:
        messages.error(request, f"{untried} not tried: the store does not answer.")


def _back_with(request: HttpRequest, back: str, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(back)


def _list(app: Celery, form: FilterForm, selection: Selection, namespaces: list[str]) -> Page:
    """Return the page that a valid form asks for, its newest records first; ``ValueError``: of another list."""
    store, chosen = get_store(app), form.cleaned_data
    page = finding.look(
        store,
        selection,
        cursor=chosen["cursor"],
        limit=PER_PAGE,
        enough=1 if selection.keys else PER_PAGE,  # few records have a key
        seconds=LOOK_SECONDS,
    )
    found = list(page.records)
    if chosen["key"] and not chosen["cursor"]:
        found += finding.find(store, chosen["key"], selection, namespaces[:_ASKED])
        found = found or finding.find_task(store, chosen["key"], selection, LOOK_SECONDS)
    others = replace(selection, keys=frozenset())  # a task id is no key
    kept = {each.identity: each for each in found if others.includes(each, page.now_ms)}
    newest = sorted(kept.values(), key=lambda each: -each.updated_ms)
    return replace(page, records=tuple(newest))
