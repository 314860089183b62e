"""What the pages accept from outside, each input with its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from django import forms

from celery_idempotent.celery.finding import (
    STATES,
    namespace_of,
    scope_in_words,
    scope_of_user,
    spellings,
)
from celery_idempotent.celery.operations import (
    LONGEST_REASON,
    Operation,
    SeenRecord,
    may_repeat,
)
from celery_idempotent.django.applications import celery_app
from celery_idempotent.errors import InvalidKey
from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Selection, State, Stored

if TYPE_CHECKING:
    from django.http import QueryDict

#: How long ago a record changed its state, for the filter.
_AGES = {
    "1m": ("1 minute", timedelta(minutes=1)),
    "1h": ("1 hour", timedelta(hours=1)),
    "1d": ("1 day", timedelta(days=1)),
    "7d": ("7 days", timedelta(days=7)),
    "30d": ("30 days", timedelta(days=30)),
}

_STATE_LABELS = {"live": "Live: queued or at work", "stale": "Stale: the lease ran out"}


class FilterForm(forms.Form):
    """Which records to list."""

    state = forms.ChoiceField(
        required=False,
        choices=[("", "Any state"), *((word, _STATE_LABELS.get(word, word)) for word in STATES)],
    )
    task = forms.CharField(
        required=False,
        max_length=MAX_CHARS,
        strip=True,
        widget=forms.TextInput(attrs={"list": "idempotency-tasks"}),
    )
    scope = forms.CharField(
        required=False,
        max_length=MAX_CHARS,
        strip=True,
        widget=forms.TextInput(attrs={"placeholder": "tenant-1, or user 17"}),
    )
    age = forms.ChoiceField(
        required=False,
        label="Last change",
        choices=[
            ("", "Any time"),
            *((word, f"over {about[0]} ago") for word, about in _AGES.items()),
        ],
    )
    key = forms.CharField(required=False, max_length=MAX_CHARS, strip=True, label="Key, or task id")
    cursor = forms.RegexField(
        r"\A[a-z]?:?[0-9a-f:]*\Z",
        error_messages={"invalid": "This is no place in the list: start again."},
        required=False,
        max_length=100,
        widget=forms.HiddenInput,
    )
    looked_at = forms.IntegerField(
        required=False, min_value=0, max_value=10**12, widget=forms.HiddenInput
    )

    def clean_task(self) -> str:
        """Return the namespace of the task or view of this name; another name is taken for a namespace."""
        name: str = self.cleaned_data["task"]
        return (name and namespace_of(celery_app(), name)) or name

    def clean_scope(self) -> str:
        """Return the scope as a record has it: ``user 17`` stands for what that user sent over HTTP."""
        scope: str = self.cleaned_data["scope"]
        try:
            return scope_of_user(scope) or scope
        except InvalidKey:
            raise forms.ValidationError("No user has such a primary key.") from None

    def selection(self, now_ms: int) -> Selection:
        """Return what was chosen, ``now_ms`` by the store's clock."""
        chosen = self.cleaned_data
        age = _AGES.get(chosen["age"])
        return Selection(
            states=STATES.get(chosen["state"], frozenset()),
            stale=chosen["state"] == "stale",
            namespace=chosen["task"] or None,
            scopes=frozenset({chosen["scope"]} if chosen["scope"] else ()),
            keys=frozenset(spellings(chosen["key"]) if chosen["key"] else ()),
            before_ms=None if age is None else now_ms - age[1] // timedelta(milliseconds=1),
        )

    def chosen(self) -> dict[str, str]:
        """Return what was chosen, for an address; without the place in the list."""
        names = ("state", "task", "scope", "age", "key")
        found = {name: self.cleaned_data[name] for name in names if self.cleaned_data[name]}
        if "scope" in found:
            found["scope"] = scope_in_words(found["scope"])
        return found


def _shown_again(completed: int, ran: int, of: int) -> str:
    """Return what has to be known: how many of the records took effect, and how many others may have."""
    perhaps = ran - completed
    if of == 1:
        took = "It took effect" if completed else "It may have taken effect"
        return f"{took}: I know that it may be done a second time."
    parts = [f"{completed} took effect"] if completed else []
    parts += [f"{perhaps} may have taken effect"] if perhaps else []
    return f"{', '.join(parts)}, of {of} records: I know that they may be done a second time."


class OperationForm(forms.Form):
    """Is an operation meant? Without a live owner among the records there is nothing to force.

    Where an effect may come about a second time that takes a tick and a reason. ``read`` makes a value of a text, where
    the operation takes one.
    """

    value = forms.CharField(
        label="Value, in JSON", strip=True, widget=forms.Textarea(attrs={"rows": 3})
    )
    again = forms.BooleanField(
        error_messages={"required": "If you know that, say so here; else take a look first."}
    )
    force = forms.BooleanField(
        required=False,
        error_messages={"required": "To take the key away from its owner, say so here."},
    )
    reason = forms.CharField(
        required=False,
        max_length=LONGEST_REASON,
        strip=True,
        widget=forms.Textarea(attrs={"rows": 3}),
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        operation: Operation,
        marks: Sequence[SeenRecord],
        live: int,
        read: Callable[[str], Stored] | None = None,
    ) -> None:
        super().__init__(data)
        self._read = read
        if read is None:
            del self.fields["value"]
        ran = [mark.state for mark in marks if may_repeat(operation, mark.state)]
        if ran:
            self.fields["again"].label = _shown_again(
                ran.count(State.COMPLETED), len(ran), len(marks)
            )
            self.fields["reason"].required = True
        else:
            del self.fields["again"]
        self.fields["force"].label = (
            f"{operation.capitalize()} also those with a live owner ({live})"
            if marks
            else f"{operation.capitalize()} although the owner is live"
        )
        if not live:
            del self.fields["force"]
        elif not marks:  # without force there is nothing to do
            self.fields["reason"].required = self.fields["force"].required = True

    def clean_value(self) -> Stored | None:
        """Return the value as the task would write it."""
        try:
            return self._read(self.cleaned_data["value"]) if self._read else None
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None

    def clean(self) -> dict[str, object]:
        """Refuse to force without a reason."""
        given: dict[str, object] = super().clean() or {}
        if given.get("force") and not given.get("reason") and not self.has_error("reason"):
            self.add_error("reason", "To take a key away from a live owner, say why.")
        return given
