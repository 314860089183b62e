"""The pages of the operations: what each would do, whether it is meant, and what came of it."""

from __future__ import annotations

import functools

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.django.admin import audit
from celery_idempotent.django.admin.base import Pages, guarded
from celery_idempotent.django.admin.forms import OperationForm
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations import Operation, Outcome, clock_ms, is_live, offered, operate
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import get_store

__all__ = ["OperationPages"]


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
        noting = functools.partial(
            audit.note, request, identity, operation, given["reason"], given.get("force", False)
        )
        try:
            outcome = operate(
                celery_app(),
                identity,
                operation,
                token=given["token"],
                state=State(given["state"]),
                force=given.get("force", False),
            )
        except IdempotencyError:
            noting("the store did not answer: it may have been done")
            raise
        wording = WORDINGS[operation]
        match outcome:
            case Outcome.DONE:
                noting("")
                messages.success(request, f"{wording.done}: {identity}.")
            case Outcome.UNSENT:
                noting("its message could not be published yet")
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
