"""The page of an operation on one record: what it would do, the confirmation, the outcome."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from celery_idempotent.celery.operations import Operation, OperationRequest, operate
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.django.admin.base import Pages, guarded
from celery_idempotent.django.admin.forms import OperationForm
from celery_idempotent.django.admin.identities import parse, unparse
from celery_idempotent.django.admin.wording import ENDINGS
from celery_idempotent.django.applications import celery_app
from celery_idempotent.operations.bulk import DONE, REFUSALS, may_repeat, verdict
from celery_idempotent.operations.choosing import EFFECTS
from celery_idempotent.operations.values import value_from_json
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import get_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A record as it was shown: what stands behind its box in the list. Nothing is done to it once it has changed."""

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


class OperationPages(Pages):
    """One page an operation, with a permission of its own."""

    @guarded("GET", "POST")
    def operation_view(
        self, request: HttpRequest, object_id: str, operation: Operation
    ) -> HttpResponse:
        """Ask whether an operation on one record is meant, and do it."""
        self.permit(request, operation)
        identity = self.identity_of(object_id)
        store = get_store(celery_app())
        record = None if identity is None else store.get(identity)
        if identity is None or record is None:
            return self.gone(request, identity)
        back = self.address_of(identity)
        sent, now_ms = request.method == "POST", store.now_ms()
        # Only a task of this app can be asked to write a value.
        known = operation != "complete" or _is_known(identity)
        found = verdict(operation, record, now_ms, known=known)
        if found == "left":
            messages.warning(request, f"Nothing was done: {REFUSALS[operation]}")
            return HttpResponseRedirect(back)
        live = found == "live"
        form = OperationForm(
            request.POST if sent else None,
            operation=operation,
            marks=() if live else (Mark.of(record),),
            live=live,
            read=functools.partial(value_from_json, celery_app(), identity),
            initial={"token": record.token, "state": record.state.value},
        )
        if not form.is_valid():
            context = {
                "title": f"{operation.capitalize()}: are you sure?",
                "operation": operation,
                "effect": EFFECTS[operation],
                "record": record,
                "identity": identity,
                "live": live,
                "stale": record.stale(now_ms),
                "form": form,
                "back": back,
                "again": may_repeat(operation, record.state),
            }
            return self.render(request, "operation", context, status=400 if sent else 200)
        given = form.cleaned_data
        wanted = OperationRequest(
            operation,
            who=request.user.get_username(),
            reason=given["reason"],
            force=given.get("force", False),
            value=given.get("value"),
        )
        outcome = operate(
            celery_app(), identity, wanted, token=given["token"], state=State(given["state"])
        )
        level, text = ENDINGS[outcome]
        done = DONE[operation].capitalize()
        messages.add_message(request, level, text.format(done=done, identity=identity))
        return HttpResponseRedirect(back)

    def permit(self, request: HttpRequest, operation: Operation) -> None:
        """Refuse a person without the permission of this operation."""
        if not self.may(request, f"{operation}_record"):
            raise PermissionDenied


def _is_known(identity: Identity) -> bool:
    return definition_of(celery_app(), identity.namespace, load=True) is not None
