"""The pages of the operations: what each would do, whether it is meant, and what came of it."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import (
    Operation,
    Outcome,
    clock_ms,
    is_live,
    offered,
    operate,
)
from celery_idempotent.django.admin import audit
from celery_idempotent.django.admin.base import Pages, guarded
from celery_idempotent.django.admin.forms import OperationForm
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import get_store

__all__ = ["OperationPages", "carry_out"]


class OperationPages(Pages):
    """One page an operation, with a permission of its own."""

    def operation_view(
        self, request: HttpRequest, object_id: str, operation: Operation
    ) -> HttpResponse:
        """Ask whether an operation is meant, and do it."""
        return self._operation(request, object_id, operation)

    @guarded("GET", "POST")
    def _operation(
        self, request: HttpRequest, object_id: str, operation: Operation
    ) -> HttpResponse:
        if not self.may(request, f"{operation}_record"):
            raise PermissionDenied
        identity = self.identity_of(object_id)
        if identity is None:
            return self.gone(request, None)
        store = get_store(celery_app())
        record = store.get(identity)
        if record is None:
            return self.gone(request, identity)
        if operation not in offered(record):
            messages.warning(request, f"Nothing was done: {WORDINGS[operation].refusal}")
            return HttpResponseRedirect(self.address_of(identity))
        live = is_live(record, clock_ms(store))
        if request.method == "GET":
            form = OperationForm(
                operation=operation,
                live=live,
                initial={"token": record.token, "state": record.state.value},
            )
            return self._ask(request, record, operation, form, live=live)
        form = OperationForm(request.POST, operation=operation, live=live)
        if not form.is_valid():
            return self._ask(request, record, operation, form, live=live, status=400)
        return self._operate(request, identity, operation, form)

    def _operate(
        self, request: HttpRequest, identity: Identity, operation: Operation, form: OperationForm
    ) -> HttpResponse:
        given = form.cleaned_data
        outcome = carry_out(
            request,
            identity,
            operation,
            seen=(given["token"], State(given["state"])),
            reason=given["reason"],
            force=given.get("force", False),
        )
        wording = WORDINGS[operation]
        match outcome:
            case Outcome.DONE:
                messages.success(request, f"{wording.done}: {identity}.")
            case Outcome.UNSENT:
                messages.warning(
                    request,
                    f"{identity} is queued, but its message could not be published: the next sweep after its"
                    " deadline tries again. The log says why.",
                )
            case Outcome.CHANGED:
                messages.error(
                    request,
                    f"Nothing was done: {identity} has changed since its page was shown. This is how it is now.",
                )
            case Outcome.LIVE:
                messages.error(
                    request,
                    f"Nothing was done: a live owner took {identity} meanwhile.",
                )
        return HttpResponseRedirect(self.address_of(identity))

    def _ask(
        self,
        request: HttpRequest,
        record: Record,
        operation: Operation,
        form: OperationForm,
        *,
        live: bool,
        status: int = 200,
    ) -> HttpResponse:
        context = {
            "title": f"{WORDINGS[operation].button}: are you sure?",
            "wording": WORDINGS[operation],
            "operation": operation,
            "record": record,
            "identity": record.identity,
            "live": live,
            "stale": record.state is State.PROCESSING and not live,
            "form": form,
            "back": self.address_of(record.identity),
        }
        return self.render(request, "operation", context, status=status)


def carry_out(
    request: HttpRequest,
    identity: Identity,
    operation: Operation,
    *,
    seen: tuple[int, State],
    reason: str,
    force: bool,
) -> Outcome:
    """Do an operation to the record with this token and state, and note it in the log.

    Raises:
        IdempotencyError: if the store did not answer; the note says what is known then.
    """
    note = audit.Note(request, identity, operation, reason=reason, forced=force)
    try:
        outcome = operate(
            celery_app(),
            identity,
            operation,
            token=seen[0],
            state=seen[1],
            force=force,
            who=request.user.get_username(),
            reason=reason,
        )
    except IdempotencyError:
        note.failed(_aftermath(identity, seen))
        raise
    match outcome:
        case Outcome.DONE:
            note.done()
        case Outcome.UNSENT:
            note.done("its message could not be published yet")
        case Outcome.CHANGED | Outcome.LIVE:
            note.withdraw()
    return outcome


def _aftermath(identity: Identity, seen: tuple[int, State]) -> str:
    """Say what is known of an operation that the store did not confirm."""
    try:
        record = get_store(celery_app()).get(identity)
    except IdempotencyError:
        return "the store did not answer: it may have been done"
    if record is not None and (record.token, record.state) == seen:
        return "right after that the record was still there, unchanged"
    return "right after that the record was gone, or another"
