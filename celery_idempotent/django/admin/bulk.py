"""One operation on the ticked records of the list: one question about all of them, and a message for each outcome.

Nothing is stored between list and question: a form carries the marks of the records (key, token, state), so that each
record is operated on only if it is still what the question showed. Those with a live owner are a list of their own:
they are operated on only if the person says so, whatever became of their owners meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from django.contrib import messages
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import ON_MANY, Operation, OperationRequest
from celery_idempotent.django.admin.base import guarded
from celery_idempotent.django.admin.forms import ConfirmForm
from celery_idempotent.django.admin.listing import PER_PAGE
from celery_idempotent.django.admin.operations import Mark, OperationPages
from celery_idempotent.django.admin.wording import ENDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.operations.bulk import DONE, REFUSALS, Verdict, execute, verdict
from celery_idempotent.operations.choosing import EFFECTS
from celery_idempotent.records import Record
from celery_idempotent.stores import Store, get_store

#: In which order a question shows verdicts.
_ORDER: tuple[Verdict, ...] = ("do", "live", "left")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """What is to become of a ticked record. ``record``: as it is now, if there is one."""

    mark: Mark
    verdict: Verdict
    text: str
    address: str
    record: Record | None
    stale: bool


class BulkPages(OperationPages):
    """The question about several records."""

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
        marks, live = _read_marks(post.getlist("record")), _read_marks(post.getlist("live"))
        if not marks and not live:
            return _back_with(request, back, "No record selected. Nothing was done.")
        if len(marks) + len(live) > PER_PAGE:
            return _back_with(request, back, f"Select {PER_PAGE} records at most.")
        form = None
        if post.get("confirmed"):
            form = ConfirmForm(post, operation=operation, marks=marks, live=len(live))
            if form.is_valid():
                force, reason = form.cleaned_data.get("force", False), form.cleaned_data["reason"]
                self._execute(request, operation, marks, reason, force=False)
                if force:
                    self._execute(request, operation, live, reason, force=True)
                elif live:
                    messages.warning(request, f"{len(live)} left alone: the owner is live.")
                return HttpResponseRedirect(back)
        return self._question(request, operation, back, [*marks, *live], form)

    def _question(
        self,
        request: HttpRequest,
        operation: Operation,
        back: str,
        marks: Iterable[Mark],
        form: ConfirmForm | None,
    ) -> HttpResponse:
        """Ask about these records, those first to which something is done; ``form``: again, for it has faults."""
        store = get_store(celery_app())
        now_ms = store.now_ms()
        lines = [self._plan(store, operation, mark, now_ms) for mark in marks]
        lines.sort(key=lambda line: _ORDER.index(line.verdict))
        counts = Counter(line.verdict for line in lines)
        doing = [line.mark for line in lines if line.verdict == "do"]
        context = {
            "title": f"{operation.capitalize()} the selected records: are you sure?",
            "operation": operation,
            "effect": EFFECTS[operation],
            "back": back,
            "lines": lines,
            "doing": counts["do"],
            "live": counts["live"],
            "left": counts["left"],
            "form": form or ConfirmForm(operation=operation, marks=doing, live=counts["live"]),
        }
        return self.render(request, "bulk", context, status=200 if form is None else 400)

    def _plan(self, store: Store, operation: Operation, mark: Mark, now_ms: int) -> PlanLine:
        """Say what an operation would do to the record that a mark stands for."""
        record = store.get(mark.identity)
        found: Verdict = "left"
        if record is None:
            text = "Left alone: there is no such record any more."
        elif Mark.of(record) != mark:
            text = "Left alone: it has changed since the list was shown."
        else:
            found = verdict(operation, record, now_ms)
            text = {
                "left": f"Left alone: {REFUSALS[operation]}",
                "live": "Left alone unless forced: its owner is live.",
                "do": f"Will be {DONE[operation]}.",
            }[found]
        return PlanLine(
            mark=mark,
            verdict=found,
            text=text,
            address=self.address_of(mark.identity),
            record=record,
            stale=record is not None and record.stale(now_ms),
        )

    def _execute(
        self,
        request: HttpRequest,
        operation: Operation,
        marks: list[Mark],
        reason: str,
        *,
        force: bool,
    ) -> None:
        """Operate on one record after the other, as far as the store answers, and tell each outcome."""
        wanted = OperationRequest(
            operation, who=request.user.get_username(), reason=reason, force=force
        )
        done, word = 0, DONE[operation].capitalize()
        ended = list(execute(celery_app(), wanted, marks))
        for each in ended:
            identity = each.record.identity
            if each.outcome is None:
                text = f"Not known whether it was done: {identity}. {each.trouble}"
                messages.error(request, text)
                continue
            level, text = ENDINGS[each.outcome]
            if level == messages.SUCCESS:
                done += 1
            else:
                messages.add_message(request, level, text.format(done=word, identity=identity))
        if done:
            messages.success(request, f"{word}: {done} of {len(marks)}.")
        if untried := len(marks) - len(ended):
            messages.error(request, f"{untried} not tried: the store does not answer.")


def _back_with(request: HttpRequest, back: str, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(back)


def _read_marks(texts: Iterable[str]) -> list[Mark]:
    """Return the marks that a form sent, each once."""
    try:
        return list({mark.identity: mark for mark in map(Mark.read, texts)}.values())
    except ValueError as error:
        raise BadRequest("This is no record of the list.") from error
