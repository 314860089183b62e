"""One operation on several records of the list: one question about all of them, each done by itself, one summary.

::

    list ─ chosen, or all that match ─▶ question ─ yes ─▶ as many as 20 s allow, 100 at most ─▶ summary
                                           ▲                                                      │
                                           └────────────── "go on": those not tried yet ◀─────────┘

Nothing is stored between the pages: a form carries the marks of the records (key, token, state), so that each record is
operated on only if it is still what the question showed. Those with a live owner are a list of their own: they are
operated on only if the person says so, whatever became of their owners meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic

from django.contrib import messages
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import ON_MANY, Operation, OperationRequest
from celery_idempotent.django.admin.base import guarded
from celery_idempotent.django.admin.forms import ConfirmForm, FilterForm
from celery_idempotent.django.admin.listing import PER_PAGE, looked_through
from celery_idempotent.django.admin.operations import Mark, OperationPages, PlanLine
from celery_idempotent.django.admin.wording import ENDINGS, WORDINGS, LineVerdict
from celery_idempotent.django.applications import celery_app
from celery_idempotent.operations.bulk import Ended, collect, execute
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store

#: So many records, each a field of the form, can be asked about: Django takes 1,000 fields.
MOST_ASKED = 500

#: So many records a request operates on, and for so many seconds; what is left is gone on with by a button.
STEP, _LONGEST_SECONDS = 100, 20.0

#: In which order a question shows verdicts, and a summary: what needs somebody first.
_ASKED: tuple[LineVerdict, ...] = ("do", "live", "left")
_TOLD: tuple[LineVerdict, ...] = ("failed", "unsent", "refused", "changed", "done", "untried")

_OWNER_WAS_LIVE = "Left alone: its owner was live."

#: The verdicts of the summary, and what it says when it counts them.
_COUNTED: dict[LineVerdict, str] = {
    "done": "done",
    "unsent": "queued, and not published yet",
    "changed": "left alone, changed since shown",
    "refused": "left alone, refused",
    "failed": "failed",
    "untried": "not tried yet",
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
        if post.get("confirmed"):
            return self._answered(request, operation, back)
        found: Iterable[tuple[Mark, Record | None]]
        more = False
        if post.get("every"):
            form = FilterForm(request.GET)
            if not form.is_valid() or not form.chosen() or form.cleaned_data["key"]:
                return _back_with(request, back, "Filter the list first. Nothing was done.")
            store = get_store(celery_app())
            records, more = collect(store, operation, looked_through(store, form), limit=MOST_ASKED)
            found = [(Mark.of(record), record) for record in records]
        else:
            found = self._now(_read_marks(post.getlist("shown" if post.get("all") else "record")))
            if len(found) > PER_PAGE:
                return _back_with(request, back, f"Select {PER_PAGE} records at most.")
        if not found:
            return _back_with(request, back, "No record selected. Nothing was done.")
        return self._question(request, operation, back, found, more=more)

    @staticmethod
    def _now(marks: Iterable[Mark]) -> list[tuple[Mark, Record | None]]:
        """Return with each mark the record as it is now."""
        store = get_store(celery_app())
        return [(mark, store.get(mark.identity)) for mark in marks]

    def _question(
        self,
        request: HttpRequest,
        operation: Operation,
        back: str,
        found: Iterable[tuple[Mark, Record | None]],
        *,
        more: bool = False,
        form: ConfirmForm | None = None,
    ) -> HttpResponse:
        """Ask about these records, those first to which something is done; ``form``: again, for it has faults."""
        now_ms = get_store(celery_app()).now_ms()
        lines = [self.plan(operation, mark, record, now_ms) for mark, record in found]
        lines.sort(key=lambda line: _ASKED.index(line.verdict))
        counts = Counter(line.verdict for line in lines)
        doing = [line.mark for line in lines if line.verdict == "do"]
        context = {
            "title": f"{WORDINGS[operation].button} the selected records: are you sure?",
            "operation": operation,
            "wording": WORDINGS[operation],
            "back": back,
            "lines": lines[:PER_PAGE],
            "unseen": lines[PER_PAGE:],
            "more": more,
            "doing": counts["do"],
            "live": counts["live"],
            "left": counts["left"],
            "form": form or ConfirmForm(operation=operation, marks=doing, live=counts["live"]),
        }
        return self.render(request, "bulk", context, status=200 if form is None else 400)

    def _answered(self, request: HttpRequest, operation: Operation, back: str) -> HttpResponse:
        """Operate on the records that were asked about, for a while, and say what came of each."""
        post = request.POST
        marks, live = _read_marks(post.getlist("record")), _read_marks(post.getlist("live"))
        if not marks and not live:
            return _back_with(request, back, "No record selected. Nothing was done.")
        if len(marks) + len(live) > MOST_ASKED:
            return _back_with(request, back, f"Select {MOST_ASKED} records at most.")
        form = ConfirmForm(post, operation=operation, marks=marks, live=len(live))
        if not form.is_valid():
            return self._question(request, operation, back, self._now([*marks, *live]), form=form)
        lines = self._execute_all(request, operation, [*marks, *live], len(marks), form)
        counted = Counter(line.verdict for line in lines)
        context = {
            "title": f"{WORDINGS[operation].button}: what came of it",
            "operation": operation,
            "wording": WORDINGS[operation],
            "back": back,
            "lines": sorted(lines, key=lambda line: _TOLD.index(line.verdict)),
            "counts": [
                f"{counted[each]} {text}" for each, text in _COUNTED.items() if counted[each]
            ],
            "tone": "well" if set(counted) <= {"done"} else "bad" if counted["failed"] else "",
            "rest": counted["untried"],
            "live": {mark.identity for mark in live},
            "form": form,
        }
        return self.render(request, "summary", context)

    def _execute_all(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: Sequence[Mark],
        live_from: int,
        form: ConfirmForm,
    ) -> list[PlanLine]:
        """Operate on one record after the other, as far as one comes; from ``live_from`` on their owners were live."""
        give_up = monotonic() + _LONGEST_SECONDS
        force = bool(form.cleaned_data.get("force", False))

        def in_time(part: Sequence[Mark]) -> Iterator[Mark]:
            for mark in part:
                if monotonic() > give_up:
                    return
                yield mark

        lines: list[PlanLine] = []
        for part, forced in ((marks[:live_from], False), (marks[live_from:], True)):
            if forced and not force:
                lines += [self.line(each, "refused", _OWNER_WAS_LIVE) for each in part]
                continue
            wanted = OperationRequest(
                operation,
                who=request.user.get_username(),
                reason=form.cleaned_data["reason"],
                force=forced,
            )
            ended = execute(celery_app(), wanted, in_time(part[: max(STEP - len(lines), 0)]))
            done = [self._told(operation, each) for each in ended]
            lines += done
            lines += [self.line(each, "untried", "Not tried yet.") for each in part[len(done) :]]
        return lines

    def _told(self, operation: Operation, ended: Ended[Mark]) -> PlanLine:
        if ended.outcome is None:
            text = f"It may have been done, or not: {ended.trouble}"
            return self.line(ended.record, "failed", text)
        ending = ENDINGS[ended.outcome]
        text = ending.line.format(done=WORDINGS[operation].done)
        return self.line(ended.record, ending.verdict, text)


def _back_with(request: HttpRequest, back: str, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(back)


def _read_marks(texts: Iterable[str]) -> list[Mark]:
    """Return the marks that a form sent, each once."""
    try:
        return list({mark.identity: mark for mark in map(Mark.read, texts)}.values())
    except ValueError as error:
        raise BadRequest("This is no record of the list.") from error
