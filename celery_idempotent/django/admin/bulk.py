"""One operation on several records of the list: one question about all of them, each done by itself, one summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic

from django.contrib import messages
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import ON_MANY, Operation
from celery_idempotent.django.admin.base import guarded
from celery_idempotent.django.admin.forms import ConfirmForm
from celery_idempotent.django.admin.listing import PER_PAGE
from celery_idempotent.django.admin.operating import Mark, OperationPages, PlanLine
from celery_idempotent.django.admin.wording import ENDINGS, WORDINGS, Verdict
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.stores import get_store

logger = logging.getLogger(__name__)

#: For so many seconds records are operated on: a store that does not answer costs a time-out for each.
_LONGEST_SECONDS = 20.0

#: The verdicts of the summary, and what it says when it counts them.
_COUNTED: dict[Verdict, str] = {
    "done": "done",
    "unsent": "queued, and not published yet",
    "changed": "left alone, changed since shown",
    "refused": "left alone, refused",
    "failed": "failed",
    "untried": "not tried",
}


class BulkPages(OperationPages):
    """The question about several records, and the summary."""

    @guarded("GET", "POST")
    def bulk_view(self, request: HttpRequest) -> HttpResponse:
        """Ask whether an operation on several records is meant, and do it."""
        query, post = request.GET.urlencode(), request.POST
        back = self.address("changelist") + (f"?{query}" if query else "")
        if request.method == "GET":
            return HttpResponseRedirect(back)  # after a login in between
        operation = next((each for each in ON_MANY if each == post.get("operation")), None)
        if operation is None:
            return _back_with(request, back, "No action selected. Nothing was done.")
        self.permit(request, operation)
        confirmed = bool(post.get("confirmed"))
        marks = _read_marks(
            post.getlist("shown" if post.get("all") and not confirmed else "record")
        )
        live = _read_marks(post.getlist("live"))
        if not marks and not live:
            return _back_with(request, back, "No record selected. Nothing was done.")
        if len(marks) + len(live) > PER_PAGE:
            return _back_with(request, back, f"Select {PER_PAGE} records at most.")
        form = ConfirmForm(post if confirmed else None, operation=operation, live=len(live))
        context: dict[str, object] = {
            "operation": operation,
            "wording": WORDINGS[operation],
            "back": back,
        }
        if form.is_valid():
            lines = list(self._carry_out_all(request, operation, marks, live, form))
            return self._summary(request, operation, lines, context)
        shown = [*marks, *live] if confirmed else marks
        store = get_store(celery_app())
        now_ms = store.now_ms()
        lines = [self.plan(operation, mark, store.get(mark.identity), now_ms) for mark in shown]
        counts = Counter(line.verdict for line in lines)
        if not confirmed:
            form = ConfirmForm(operation=operation, live=counts["live"])
        context |= {
            "title": f"{WORDINGS[operation].button} the selected records: are you sure?",
            "lines": lines,
            "doing": counts["do"],
            "live": counts["live"],
            "left": counts["left"],
            "form": form,
        }
        return self.render(request, "bulk", context, status=400 if confirmed else 200)

    def _carry_out_all(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: Iterable[Mark],
        live: Iterable[Mark],
        form: ConfirmForm,
    ) -> Iterator[PlanLine]:
        """Operate on one record after the other, whatever comes of those before it."""
        reason, force = form.cleaned_data["reason"], form.cleaned_data.get("force", False)
        give_up = monotonic() + _LONGEST_SECONDS
        for mark in marks:
            yield self._carry_out_one(request, operation, mark, reason, give_up, force=False)
        for mark in live:
            if force:
                yield self._carry_out_one(request, operation, mark, reason, give_up, force=True)
            else:
                yield self.line(mark, "refused", "Left alone: its owner was live.")

    def _carry_out_one(
        self,
        request: HttpRequest,
        operation: Operation,
        mark: Mark,
        reason: str,
        give_up: float,
        *,
        force: bool,
    ) -> PlanLine:
        if monotonic() > give_up:
            return self.line(mark, "untried", "Not tried: those before it took too long.")
        try:
            ending = ENDINGS[self.carry_out(request, operation, mark, reason=reason, force=force)]
        except IdempotencyError as error:
            logger.warning("idempotency: %s of %s failed: %s", operation, mark.identity, error)
            return self.line(mark, "failed", f"It may have been done, or not: {error}")
        except Exception as error:  # a fault that concerns one record; the others wait
            logger.exception("idempotency: %s of %s failed", operation, mark.identity)
            text = f"It may have been done, or not: {type(error).__name__}. The log says more."
            return self.line(mark, "failed", text)
        return self.line(mark, ending.verdict, ending.line.format(done=WORDINGS[operation].done))

    def _summary(
        self,
        request: HttpRequest,
        operation: Operation,
        lines: list[PlanLine],
        context: dict[str, object],
    ) -> HttpResponse:
        counted = Counter(line.verdict for line in lines)
        context |= {
            "title": f"{WORDINGS[operation].button}: what came of it",
            "lines": lines,
            "counts": [
                f"{counted[each]} {text}" for each, text in _COUNTED.items() if counted[each]
            ],
            "well": set(counted) <= {"done"},
        }
        return self.render(request, "summary", context)


def _back_with(request: HttpRequest, back: str, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(back)


def _read_marks(texts: Iterable[str]) -> list[Mark]:
    """Return the marks that a form sent, each once."""
    try:
        return list({mark.identity: mark for mark in map(Mark.read, texts)}.values())
    except ValueError as error:
        raise BadRequest("This is no record of the list.") from error
