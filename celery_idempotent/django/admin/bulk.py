"""One operation on several records of the list: one question about all of them, each done by itself, one summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal

from django.contrib import messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import (
    OPERATIONS,
    Operation,
    Outcome,
    clock_ms,
    is_live,
    offered,
)
from celery_idempotent.django.admin.base import Pages, guarded
from celery_idempotent.django.admin.forms import BulkForm
from celery_idempotent.django.admin.identities import parse, unparse
from celery_idempotent.django.admin.listing import PER_PAGE
from celery_idempotent.django.admin.operating import carry_out
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery_idempotent.stores import Store

__all__ = ["BulkPages", "Mark"]

logger = logging.getLogger(__name__)

#: For so many seconds records are operated on: a store that does not answer costs a time-out for each.
_PATIENCE = 20.0

#: What is, or was, to become of a record.
Verdict = Literal["do", "live", "left", "done", "unsent", "changed", "refused", "failed", "untried"]

#: The verdicts of the summary, and what it says when it counts them.
_COUNTED: dict[Verdict, str] = {
    "done": "done",
    "unsent": "queued, and not published yet",
    "changed": "left alone, changed since shown",
    "refused": "left alone, refused",
    "failed": "failed",
    "untried": "not tried",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A record as it was shown: what stands behind its box in the list."""

    identity: Identity
    token: int
    state: State

    @classmethod
    def of(cls, record: Record) -> Mark:
        """Return the mark of a record."""
        return cls(identity=record.identity, token=record.token, state=record.state)

    @classmethod
    def read(cls, text: str) -> Mark:
        """Return what was written as a text.

        Raises:
            ValueError: if it is none.
        """
        token, state, name = text.split(" ", 2)
        if not (token.isascii() and token.isdecimal() and len(token) < 20):
            raise ValueError("no token")
        return cls(identity=parse(name), token=int(token), state=State(state))

    def __str__(self) -> str:
        return f"{self.token} {self.state.value} {unparse(self.identity)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the question or of the summary. ``record``: as it is now, where that was looked at."""

    mark: Mark
    verdict: Verdict
    text: str
    address: str
    record: Record | None = None
    stale: bool = False


class BulkPages(Pages):
    """The question about several records, and the summary."""

    def bulk_view(self, request: HttpRequest) -> HttpResponse:
        """Ask whether an operation on several records is meant, and do it."""
        return self._bulk(request)

    @guarded("GET", "POST")
    def _bulk(self, request: HttpRequest) -> HttpResponse:
        query = request.GET.urlencode()
        back = self.address("changelist") + (f"?{query}" if query else "")
        if request.method == "GET":
            return HttpResponseRedirect(back)  # somebody who had to log in first
        operation = next(
            (each for each in OPERATIONS if each == request.POST.get("operation")), None
        )
        if operation is None:
            return self._nothing(request, back, "No action selected. Nothing was done.")
        if not self.may(request, f"{operation}_record"):
            raise PermissionDenied
        shown = request.POST.get("all") and not request.POST.get("confirmed")
        marks = _read(request.POST.getlist("shown" if shown else "record"))
        live = _read(request.POST.getlist("live"))
        if not marks and not live:
            return self._nothing(request, back, "No record selected. Nothing was done.")
        if len(marks) + len(live) > PER_PAGE:
            return self._nothing(request, back, f"Select {PER_PAGE} records at most.")
        if not request.POST.get("confirmed"):
            lines = self._plan(get_store(celery_app()), operation, marks)
            form = BulkForm(operation=operation, live=_count(lines, "live"))
            return self._question(request, operation, lines, form, back)
        form = BulkForm(request.POST, operation=operation, live=len(live))
        if not form.is_valid():
            lines = self._plan(get_store(celery_app()), operation, [*marks, *live])
            return self._question(request, operation, lines, form, back, status=400)
        lines = list(self._carry_out(request, operation, marks, live, form))
        return self._summary(request, operation, lines, back)

    def _nothing(self, request: HttpRequest, back: str, why: str) -> HttpResponse:
        messages.warning(request, why)
        return HttpResponseRedirect(back)

    # -- the question

    def _plan(self, store: Store, operation: Operation, marks: Iterable[Mark]) -> list[Line]:
        now_ms = clock_ms(store)
        return [self._planned(operation, mark, store.get(mark.identity), now_ms) for mark in marks]

    def _planned(
        self, operation: Operation, mark: Mark, record: Record | None, now_ms: int
    ) -> Line:
        wording = WORDINGS[operation]
        verdict: Verdict = "left"
        if record is None:
            text = "Left alone: there is no such record any more."
        elif Mark.of(record) != mark:
            text = "Left alone: it has changed since the list was shown."
        elif operation not in offered(record):
            text = f"Left alone: {wording.refusal}"
        elif is_live(record, now_ms):
            verdict, text = "live", "Left alone unless forced: its owner is live."
        else:
            verdict, text = "do", f"Will be {wording.done.lower()}."
        return Line(
            mark=mark,
            verdict=verdict,
            text=text,
            address=self.address_of(mark.identity),
            record=record,
            stale=record is not None and record.stale(now_ms),
        )

    def _question(
        self,
        request: HttpRequest,
        operation: Operation,
        lines: list[Line],
        form: BulkForm,
        back: str,
        *,
        status: int = 200,
    ) -> HttpResponse:
        context = {
            "title": f"{WORDINGS[operation].button} the selected records: are you sure?",
            "operation": operation,
            "wording": WORDINGS[operation],
            "lines": lines,
            "doing": _count(lines, "do"),
            "live": _count(lines, "live"),
            "left": _count(lines, "left"),
            "form": form,
            "back": back,
        }
        return self.render(request, "bulk", context, status=status)

    # -- the deed

    def _carry_out(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: Iterable[Mark],
        live: Iterable[Mark],
        form: BulkForm,
    ) -> Iterator[Line]:
        """Operate on one record after the other, whatever comes of those before it."""
        reason, force = form.cleaned_data["reason"], form.cleaned_data.get("force", False)
        give_up = monotonic() + _PATIENCE
        for mark in marks:
            yield self._operated(request, operation, mark, reason, give_up, force=False)
        for mark in live:
            if force:
                yield self._operated(request, operation, mark, reason, give_up, force=True)
            else:
                yield self._line(mark, "refused", "Left alone: its owner was live.")

    def _operated(
        self,
        request: HttpRequest,
        operation: Operation,
        mark: Mark,
        reason: str,
        give_up: float,
        *,
        force: bool,
    ) -> Line:
        if monotonic() > give_up:
            return self._line(mark, "untried", "Not tried: those before it took too long.")
        try:
            outcome = carry_out(
                request,
                mark.identity,
                operation,
                seen=(mark.token, mark.state),
                reason=reason,
                force=force,
            )
        except IdempotencyError as error:
            logger.warning("idempotency: %s of %s failed: %s", operation, mark.identity, error)
            return self._line(mark, "failed", f"It may have been done, or not: {error}")
        except Exception as error:  # a fault that concerns one record; the others wait
            logger.exception("idempotency: %s of %s failed", operation, mark.identity)
            text = f"It may have been done, or not: {type(error).__name__}. The log says more."
            return self._line(mark, "failed", text)
        match outcome:
            case Outcome.DONE:
                return self._line(mark, "done", f"{WORDINGS[operation].done}.")
            case Outcome.UNSENT:
                text = (
                    "Queued, and not published yet: the next sweep after its deadline tries again."
                )
                return self._line(mark, "unsent", text)
            case Outcome.CHANGED:
                text = "Left alone: it has changed since it was shown."
                return self._line(mark, "changed", text)
            case Outcome.LIVE:
                return self._line(mark, "refused", "Left alone: a live owner took it meanwhile.")

    def _line(self, mark: Mark, verdict: Verdict, text: str) -> Line:
        return Line(mark=mark, verdict=verdict, text=text, address=self.address_of(mark.identity))

    def _summary(
        self, request: HttpRequest, operation: Operation, lines: list[Line], back: str
    ) -> HttpResponse:
        counted = Counter(line.verdict for line in lines)
        context = {
            "title": f"{WORDINGS[operation].button}: what came of it",
            "wording": WORDINGS[operation],
            "lines": lines,
            "counts": [
                f"{counted[each]} {text}" for each, text in _COUNTED.items() if counted[each]
            ],
            "well": set(counted) <= {"done"},
            "back": back,
        }
        return self.render(request, "summary", context)


def _read(texts: Iterable[str]) -> list[Mark]:
    """Return the marks that a form sent, each once."""
    try:
        return list({mark.identity: mark for mark in map(Mark.read, texts)}.values())
    except ValueError as error:
        raise BadRequest("This is no record of the list.") from error


def _count(lines: Iterable[Line], verdict: Verdict) -> int:
    return sum(line.verdict == verdict for line in lines)
