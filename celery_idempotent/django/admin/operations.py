"""The operations, each in one flow: what it would do to a record as it was shown, the confirmation, what came of it.

::

    list ─ Mark ──▶ plan: "do" │ "live" │ "left" ──▶ question, ConfirmForm ──▶ execute ──▶ a line, or a message

A page about one record asks about one mark, the list about many (:mod:`~celery_idempotent.django.admin.bulk`).
"""

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
from celery_idempotent.django.admin.wording import ENDINGS, WORDINGS, LineVerdict
from celery_idempotent.django.applications import celery_app
from celery_idempotent.operations.bulk import may_repeat
from celery_idempotent.operations.bulk import verdict as verdict_on
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """What is to become of a record, or came of it. ``record``: as it is now, where that was looked at."""

    mark: Mark
    verdict: LineVerdict
    text: str
    address: str
    record: Record | None = None
    stale: bool = False


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
        back, wording = self.address_of(identity), WORDINGS[operation]
        sent = request.method == "POST"
        asked = request.GET.get("step") or None
        step = asked or (operation == "complete" and request.POST.get("step")) or None
        line = self.plan(operation, Mark.of(record), record, store.now_ms(), step=step)
        if line.verdict == "left":
            messages.warning(request, f"Nothing was done: {wording.refusal}")
            return HttpResponseRedirect(back)
        live = line.verdict == "live"
        form = OperationForm(
            request.POST if sent else None,
            operation=operation,
            marks=() if live else (line.mark,),
            live=live,
            read=functools.partial(value_from_json, celery_app(), identity),
            of_step=asked is not None,
            initial={"token": record.token, "state": record.state.value},
        )
        if not form.is_valid():
            context = {
                "title": f"{wording.button}: are you sure?",
                "wording": wording,
                "effect": wording.step_effect if asked else wording.effect,
                "step": asked,
                "operation": operation,
                "record": record,
                "identity": identity,
                "live": live,
                "stale": line.stale,
                "form": form,
                "back": back,
                "again": may_repeat(operation, record.state),
            }
            return self.render(request, "operation", context, status=400 if sent else 200)
        given = form.cleaned_data
        mark = Mark(identity=identity, token=given["token"], state=State(given["state"]))
        wanted = OperationRequest(
            operation,
            who=request.user.get_username(),
            reason=given["reason"],
            force=given.get("force", False),
            step=step,
            value=given.get("value"),
        )
        outcome = operate(celery_app(), mark.identity, wanted, token=mark.token, state=mark.state)
        ending = ENDINGS[outcome]
        text = ending.message.format(done=wording.done, identity=identity)
        messages.add_message(request, ending.level, text)
        return HttpResponseRedirect(back)

    def permit(self, request: HttpRequest, operation: Operation) -> None:
        """Refuse a person without the permission of this operation."""
        if not self.may(request, f"{operation}_record"):
            raise PermissionDenied

    def line(self, mark: Mark, verdict: LineVerdict, text: str) -> PlanLine:
        """Return a line about a record that was not looked at."""
        return PlanLine(
            mark=mark, verdict=verdict, text=text, address=self.address_of(mark.identity)
        )

    def plan(
        self,
        operation: Operation,
        mark: Mark,
        record: Record | None,
        now_ms: int,
        *,
        step: str | None = None,
    ) -> PlanLine:
        """Say what an operation would do to the record that a mark stands for, ``record`` being what is there now."""
        wording = WORDINGS[operation]
        verdict: LineVerdict = "left"
        if record is None:
            text = "Left alone: there is no such record any more."
        elif Mark.of(record) != mark:
            text = "Left alone: it has changed since the list was shown."
        else:
            known = _known_operation(operation, record)
            verdict = verdict_on(operation, record, now_ms, known=known, step=step)
            text = {
                "left": f"Left alone: {wording.refusal}",
                "live": "Left alone unless forced: its owner is live.",
                "do": f"Will be {wording.done.lower()}.",
            }[verdict]
        return PlanLine(
            mark=mark,
            verdict=verdict,
            text=text,
            address=self.address_of(mark.identity),
            record=record,
            stale=record is not None and record.stale(now_ms),
        )


def _known_operation(operation: Operation, record: Record) -> bool:
    """May this app's tasks be asked to write a value of the record, where the operation takes one?"""
    if operation != "complete":
        return True
    return definition_of(celery_app(), record.identity.namespace, load=True) is not None
