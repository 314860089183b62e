"""The forms of the admin: the filter of the list, and the question about an operation."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django import forms

from celery_idempotent.celery.finding import select
from celery_idempotent.celery.operations import Operation
from celery_idempotent.celery.story import value_from_json
from celery_idempotent.django.applications import celery_app
from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Record, Selection, State, Stored

if TYPE_CHECKING:
    from celery import Celery
    from django.http import QueryDict

    from celery_idempotent.stores import Store

#: When a record changed its state, for the filter.
_AGES = {
    "last10m": ("within 10 minutes", "since_ms", timedelta(minutes=10)),
    "last1h": ("within 1 hour", "since_ms", timedelta(hours=1)),
    "last1d": ("within 1 day", "since_ms", timedelta(days=1)),
    "1h": ("over 1 hour ago", "before_ms", timedelta(hours=1)),
    "1d": ("over 1 day ago", "before_ms", timedelta(days=1)),
    "7d": ("over 7 days ago", "before_ms", timedelta(days=7)),
}

_STATES = {
    "": "Unfinished and failed; any with scope or key",
    "any": "Any state",
    "live": "Live: queued or running",
    "stale": "Stale: the lease ran out",
    **{state.value: state.value for state in State},
}


def _text(label: str | None = None, **attributes: str) -> forms.CharField:
    widget = forms.TextInput(attrs=attributes)
    return forms.CharField(required=False, max_length=MAX_CHARS, label=label, widget=widget)


class FilterForm(forms.Form):
    """Which records to list."""

    state = forms.ChoiceField(required=False, choices=[*_STATES.items()])
    task = _text(list="idempotency-tasks")
    scope = _text(placeholder="tenant-1, or user 17")
    age = forms.ChoiceField(
        required=False,
        label="Last change",
        choices=[("", "Any time"), *((age, text) for age, (text, _, _) in _AGES.items())],
    )
    error = _text("Class of error", placeholder="ValueError")
    key = _text("Key, or task id")
    cursor = forms.CharField(required=False, max_length=100, widget=forms.HiddenInput)

    def chosen(self) -> dict[str, str]:
        """Return the filters that are set, for an address; without the place in the list."""
        names = ("state", "task", "scope", "age", "error", "key")
        return {name: self.cleaned_data[name] for name in names if self.cleaned_data[name]}

    def selection(self, app: Celery, store: Store) -> Selection:
        """Return the selection of these filters; raise as :func:`select`."""
        bounds = {}
        if age := self.cleaned_data["age"]:
            _, bound, ago = _AGES[age]
            bounds[bound] = store.now_ms() - ago // timedelta(milliseconds=1)
        return select(app, self.chosen(), **bounds)


class OperationForm(forms.Form):
    """The question about an operation: ``value`` only to complete, ``force`` only for a live owner or another end."""

    value = forms.CharField(label="Value, in JSON", widget=forms.Textarea(attrs={"rows": 3}))
    force = forms.BooleanField(required=False, label="Also if the owner is live")
    reason = forms.CharField(
        required=False, max_length=500, widget=forms.Textarea(attrs={"rows": 3})
    )

    def __init__(
        self, operation: Operation, seen: Record, data: QueryDict | None = None, *, live: bool
    ) -> None:
        super().__init__(data)
        self._identity = seen.identity
        if replaces := operation == "complete" and seen.state.is_final:
            force = self.fields["force"]
            force.required, force.label = True, "Replace how it ended"
        for name, wanted in {"value": operation == "complete", "force": live or replaces}.items():
            if not wanted:
                del self.fields[name]

    def clean_value(self) -> Stored:
        """Return the value as the task would write it."""
        try:
            return value_from_json(celery_app(), self._identity, self.cleaned_data["value"])
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None

    def clean(self) -> dict[str, object]:
        """Refuse to force without a reason."""
        given: dict[str, object] = super().clean() or {}
        if given.get("force") and not given.get("reason") and not self.has_error("reason"):
            self.add_error("reason", "To force it, say why.")
        return given
