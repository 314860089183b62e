"""How a view is guarded: the arguments of its decorator over the setting ``IDEMPOTENCY_HTTP``, checked and frozen.

::

    IDEMPOTENCY_HTTP = {"lease": 60, "required": False}    the setting
    @idempotent_view(lease=5)                              the view: HttpOptions(lease_ms=5_000, required=False, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.utils.module_loading import import_string

from celery_idempotent.errors import InvalidOption
from celery_idempotent.protocol.options import (
    Policy,
    accept_if,
    duration,
    fields_by_option,
    flag,
    option,
    optional,
    read_options,
    whole_number,
)

#: The one setting: a dict with any of the options of :class:`HttpOptions`.
HTTP_SETTING: Final = "IDEMPOTENCY_HTTP"

#: The namespace of the keys of all views with ``@idempotent_view``.
HTTP_NAMESPACE: Final = "http"

#: Where a request has its ``Idempotency-Key``.
KEY_META: Final = "HTTP_IDEMPOTENCY_KEY"

#: The methods that need a key; the others have no effect to repeat.
METHODS: Final = frozenset(("POST", "PUT", "PATCH", "DELETE"))

#: Takes the request: Django's ``HttpRequest`` or, in a view of Django REST framework, that framework's ``Request``.
RequestFunction = Callable[..., object]

#: The options that ``@keyed_view`` takes: those of the header. The task has the others.
_KEYED: Final = frozenset(("scope", "required", "max_request_bytes", "docs_url"))

_string = accept_if(lambda value: isinstance(value, str), "must be a string")


def _callable(value: object) -> RequestFunction:
    try:
        found: object = import_string(value) if isinstance(value, str) else value
    except ImportError as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if not callable(found) or iscoroutinefunction(found):
        raise ValueError("must be a function of the request, no coroutine, or its dotted path")
    return found


def _statuses(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("must be a sequence")
    found = tuple(value)
    if not all(isinstance(each, int) and 100 <= each < 500 for each in found):
        raise ValueError("must be statuses below 500; those from 500 are never stored")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The options of ``@idempotent_view`` and of the setting ``IDEMPOTENCY_HTTP``."""

    scope: RequestFunction | None = option(None, optional(_callable))
    required: bool = option(True, flag)
    authorize: RequestFunction | None = option(None, optional(_callable))
    fingerprint: RequestFunction | None = option(None, optional(_callable))
    lease_ms: int = option(30_000, duration(at_least_ms=100))
    retention_ms: int = option(24 * 3_600_000, duration())
    wait_ms: int = option(0, duration())
    unstored: tuple[int, ...] = option(
        (400, 401, 403, 405, 406, 408, 411, 413, 415, 425, 429), _statuses
    )
    max_request_bytes: int = option(10 * 1024 * 1024, whole_number)
    max_response_bytes: int = option(1024 * 1024, whole_number)
    docs_url: str | None = option(None, optional(_string))
    atomic: bool = option(False, flag)

    @property
    def policy(self) -> Policy:
        """The policy of the runs that guard the view."""
        return Policy(
            lease_ms=self.lease_ms,
            retention_ms=self.retention_ms,
            wait_ms=self.wait_ms,
            atomic=self.atomic,
            on_conflict="wait" if self.wait_ms else "raise",
            max_result_bytes=self.max_response_bytes,
        )

    def is_stored(self, status: int) -> bool:
        """Is an answer with this status stored, and repeated? After any other the request may be tried again."""
        return status < 500 and status not in self.unstored


def http_options(given: Mapping[str, object] | None = None) -> HttpOptions:
    """Return the options of a view: what is ``given`` wins over the setting.

    Raises:
        InvalidOption: for an unknown name or a bad value, saying what is allowed.
    """
    setting = getattr(settings, HTTP_SETTING, None) or {}
    if not isinstance(setting, Mapping):
        raise InvalidOption(f"the setting {HTTP_SETTING} must be a dict of options.")
    return read_options(
        HttpOptions, [(f"the setting {HTTP_SETTING}", setting), ("this view", given or {})]
    )


def refuse_unused(given: Mapping[str, object]) -> None:
    """Refuse options that were given to ``@keyed_view`` and do nothing there.

    Raises:
        InvalidOption: naming them, and where they belong.
    """
    unused = sorted((given.keys() & fields_by_option(HttpOptions).keys()) - _KEYED)
    if unused:
        raise InvalidOption(
            f"{', '.join(unused)} does nothing for keyed_view: it is for idempotent_view, or an option of the task."
        )
