"""The forms of the admin: the filter of the list, and the question about an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.core.validators import RegexValidator

from celery_idempotent.celery.finding import AGE, STATES
from celery_idempotent.celery.operations import Operation
from celery_idempotent.celery.story import value_from_json
from celery_idempotent.django.applications import celery_app
from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Record, Stored

if TYPE_CHECKING:
    from django.http import QueryDict


_DEFAULT = "Unfinished and failed; any with scope or key"

_AGE = RegexValidator(f"^{AGE.pattern}$", "Write 90s, 10m, 2h or 1d.")


def _text(label: str | None = None, *validators: Any, **attributes: str) -> forms.CharField:
    widget = forms.TextInput(attrs=attributes)
    how: dict[str, Any] = {"max_length": MAX_CHARS, "validators": validators, "widget": widget}
    return forms.CharField(required=False, label=label, **how)


class FilterForm(forms.Form):
    """Which records to list: the options of ``celery idempotency list``."""

    state = forms.ChoiceField(required=False, choices=[("", _DEFAULT), *STATES.items()])
    task = _text(list="idempotency-tasks")
    scope = _text(placeholder='tenant-1, or ["user", 17]')
    since = _text("Changed within", _AGE, placeholder="10m, 2h, 1d")
    before = _text("Not changed for", _AGE, placeholder="10m, 2h, 1d")
    error = _text("Class of error", placeholder="ValueError")
    key = _text("Key, or task id")
    cursor = forms.CharField(required=False, max_length=100, widget=forms.HiddenInput)

    def chosen(self) -> dict[str, str]:
        """Return the filters that are set, for an address; without the place in the list."""
        given = self.cleaned_data.items()
        return {name: text for name, text in given if text and name != "cursor"}


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
