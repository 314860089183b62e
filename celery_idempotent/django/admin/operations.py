"""The page of an operation on one record or several: what it would do, the confirmation, a message for the outcome.

Nothing is stored between the pages: a form carries the marks of the records (key, token, state), so that each record is
operated on only if it is still what the question showed. Those with a live owner are a list of their own: they are
operated on only if the person says so, whatever became of their owners meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.contrib import messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import (
    ON_MANY,
    OPERATIONS,
    Operation,
    OperationRequest,
    Outcome,
    Verdict,
    operate_on_each,
    verdict,
)
from celery_idempotent.celery.story import value_from_json
from celery_idempotent.django.admin.audit import parse, unparse
from celery_idempotent.django.admin.base import Pages, guarded
from celery_idempotent.django.admin.forms import OperationForm
from celery_idempotent.django.applications import celery_app
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import Store, get_store

#: So many records make a page.
PER_PAGE = 50

#: What becomes of a record, in the order in which a question shows it.
_VERDICTS: dict[Verdict, str] = {
    "apply": "Will be {0.done}.",
    "held": "Left alone unless forced: its owner is live.",
    "skip": "Left alone: {0.refusal}",
}


def mark_of(record: Record) -> str:
    """Return a record as it was shown, for its box in the list: nothing is done to it once it has changed."""
    return f"{record.token} {record.state.value} {unparse(record.identity)}"


def _read_marks(texts: Iterable[str]) -> list[Record]:
    """Return the records, as they were shown, whose marks a form sent, each once."""
    found: dict[Identity, Record] = {}
    try:
        for text in texts:
            token, state, name = text.split(" ", 2)
            if not (token.isascii() and token.isdecimal() and len(token) < 20):
                raise ValueError("no token")
            seen = Record(
                identity=parse(name),
                state=State(state),
                token=int(token),
                created_ms=0,
                updated_ms=0,
            )
            found[seen.identity] = seen
    except ValueError as error:
        raise BadRequest("This is no record of the list.") from error
    return list(found.values())


class PlanLine(NamedTuple):
    """What is to become of a record that was ``seen``. ``record``: as it is now, if there is one."""

    seen: Record
    mark: str
    verdict: Verdict
    text: str
    address: str
    record: Record | None
    stale: bool


class OperationPages(Pages):
    """The question about an operation, from the page of a record and from the list, and its execution."""

    @guarded("GET", "POST")
    def operation_view(
        self, request: HttpRequest, object_id: str, operation: Operation
    ) -> HttpResponse:
        """Ask whether an operation on one record is meant, and do it."""
        identity = self.identity_of(object_id)
        self._permit(request, operation)
        if identity is None:
            return self.gone(request, None)
        back = self.address_of(identity)
        if request.method == "POST":
            return self._operate(request, operation, back)
        record = get_store(celery_app()).get(identity)
        if record is None:
            return self.gone(request, identity)
        return self._question(request, operation, [record], back)

    @guarded("GET", "POST")
    def bulk_view(self, request: HttpRequest) -> HttpResponse:
        """Ask whether an operation on the ticked records of the list is meant, and do it."""
        query = request.GET.urlencode()
        back = self.address("changelist") + (f"?{query}" if query else "")
        if request.method == "GET":
            return HttpResponseRedirect(back)  # after a login in between
        for operation in ON_MANY:
            if operation == request.POST.get("operation"):
                self._permit(request, operation)
                return self._operate(request, operation, back)
        return _back_with(request, back, "No action selected. Nothing was done.")

    def _permit(self, request: HttpRequest, operation: Operation) -> None:
        """Refuse a person without the permission of this operation."""
        if not self.may(request, f"{operation}_record"):
            raise PermissionDenied

    def _operate(self, request: HttpRequest, operation: Operation, back: str) -> HttpResponse:
        """Do what a form says, or ask about it."""
        post = request.POST
        marks, live = _read_marks(post.getlist("record")), _read_marks(post.getlist("live"))
        if not marks and not live:
            return _back_with(request, back, "No record selected. Nothing was done.")
        if len(marks) + len(live) > (PER_PAGE if operation in ON_MANY else 1):
            return _back_with(request, back, f"Select {PER_PAGE} records at most.")
        if not post.get("confirmed"):
            return self._question(request, operation, marks, back)
        form = _form(operation, marks, live, request)
        if not form.is_valid():
            return self._question(request, operation, [*marks, *live], back, form)
        _execute(request, operation, marks, form, force=False)
        if form.cleaned_data.get("force", False):
            _execute(request, operation, live, form, force=True)
        elif live:
            messages.warning(request, f"{len(live)} left alone: the owner is live.")
        return HttpResponseRedirect(back)

    def _question(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: Iterable[Record],
        back: str,
        form: OperationForm | None = None,
    ) -> HttpResponse:
        """Ask about these records, those first to which something is done; ``form``: again, for it has faults."""
        store = get_store(celery_app())
        now_ms = store.now_ms()
        lines = [self._plan(store, operation, each, now_ms) for each in marks]
        by_verdict = {each: [line for line in lines if line.verdict == each] for each in _VERDICTS}
        apply, held, skip = by_verdict.values()
        if len(lines) == len(skip) == 1:
            return _back_with(request, back, f"Nothing was done. {lines[0].text}")
        context = {
            "title": f"{operation.capitalize()}: are you sure?",
            "operation": operation,
            "effect": OPERATIONS[operation].effect,
            "back": back,
            "lines": [*apply, *held, *skip],
            "doing": len(apply),
            "live": len(held),
            "left": len(skip),
            "one": len(lines) == 1,
            "form": form
            or _form(operation, [line.seen for line in apply], [line.seen for line in held]),
        }
        return self.render(request, "operation", context, status=400 if form else 200)

    def _plan(self, store: Store, operation: Operation, seen: Record, now_ms: int) -> PlanLine:
        """Say what an operation would do to a record that was seen."""
        record = store.get(seen.identity)
        found: Verdict = "skip"
        if record is None:
            text = "Left alone: there is no such record any more."
        elif mark_of(record) != mark_of(seen):
            text = "Left alone: it has changed since it was shown."
        else:
            found = verdict(celery_app(), operation, record, now_ms)
            text = _VERDICTS[found].format(OPERATIONS[operation])
        address, stale = self.address_of(seen.identity), bool(record and record.stale(now_ms))
        return PlanLine(seen, mark_of(seen), found, text, address, record, stale)


def _execute(
    request: HttpRequest,
    operation: Operation,
    marks: Sequence[Record],
    form: OperationForm,
    *,
    force: bool,
) -> None:
    """Operate on one record after the other, as far as the store answers, and tell each outcome."""
    wanted = OperationRequest(
        operation,
        who=request.user.get_username(),
        reason=form.cleaned_data["reason"],
        force=force,
        value=form.cleaned_data.get("value"),
    )
    done, untried = [], len(marks)
    for mark, outcome, trouble in operate_on_each(celery_app(), wanted, marks):
        untried -= 1
        if outcome is Outcome.DONE:
            done.append(mark.identity)
        elif outcome is None:
            text = f"Not known whether it was done: {mark.identity}. {trouble}"
            messages.error(request, text)
        else:
            level = messages.WARNING if outcome is Outcome.UNSENT else messages.ERROR
            messages.add_message(request, level, f"{outcome.value} ({mark.identity})")
    if done:
        which = f"{len(done)} of {len(marks)}" if len(marks) > 1 else done[0]
        messages.success(request, f"{OPERATIONS[operation].done.capitalize()}: {which}.")
    if untried:
        messages.error(request, f"{untried} not tried: the store does not answer.")


def _form(
    operation: Operation,
    marks: Sequence[Record],
    live: Sequence[Record],
    request: HttpRequest | None = None,
) -> OperationForm:
    read = None
    if operation not in ON_MANY:
        read = functools.partial(value_from_json, celery_app(), (*marks, *live)[0].identity)
    data = None if request is None else request.POST
    return OperationForm(data, operation=operation, marks=marks, live=len(live), read=read)


def _back_with(request: HttpRequest, back: str, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(back)
