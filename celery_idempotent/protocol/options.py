"""Declares the options of tasks and views: each has a default, and a reader for what the user gives.

The options are the fields of a frozen dataclass, an options class. The line ::

    lease_ms: int = option(60_000, duration(at_least_ms=100))

is the option ``lease``: the user gives seconds or a timedelta, the field has milliseconds::

    Policy       a task: its attribute idempotency_<name>, or that setting of the app
    HttpOptions  a view: an argument of its decorator, or an entry of the setting IDEMPOTENCY_HTTP

A reader is a function that takes what the user gave, and returns the value for the field. It refuses by raising a
``ValueError`` with the end of a sentence; :func:`read_options` adds the beginning::

    "must be at least 0.1 seconds"   →   idempotency_lease of task shop.charge must be at least 0.1 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, Final, TypeVar, get_args

from celery_idempotent.errors import InvalidOption
from celery_idempotent.settings import milliseconds

#: Options that were removed, as users write them: those of tasks with their prefix. A sentence says what replaces each.
REMOVED: Final[Mapping[str, str]] = {
    "idempotency_check_at_start": "Every worker logs what the checks find.",
    "idempotency_compression": "Values are stored as their serializer writes them: register one with kombu that"
    " compresses.",
    "idempotency_conflict_backoff_max": "A copy comes back after 10 seconds at the most.",
    "idempotency_failure_retention": "A failed key is kept for the idempotency_retention.",
    "idempotency_fused_result": "The settle stores the result where store and result backend are one Redis database.",
    "idempotency_key_before": "Messages in flight keep their key; give a changed key to a task with a new name.",
    "idempotency_namespace_before": "Set idempotency_namespace to the old name.",
    "idempotency_replica_timeout": "Set min-replicas-to-write on the Redis server.",
    "idempotency_replicas": "Set min-replicas-to-write on the Redis server.",
    "idempotency_require_key": "A task that states an idempotency_key needs a key.",
    "idempotency_scope_before": "Messages in flight keep their scope.",
    "idempotency_silenced_checks": "Django's SILENCED_SYSTEM_CHECKS hides findings there.",
    "anonymous": "Set scope to celery_idempotent.django.http.session_scope.",
    "app": "Set CELERY_IDEMPOTENT_APP.",
    "attributes": "Set a header of the response: replays have it.",
    "checks": "Put a decorator that validates the request around @idempotent_view.",
    "headers": "All headers are stored but those that belong to one answer.",
    "max_crashes": "After three ends of its process a request is settled as failed.",
    "methods": "POST, PUT, PATCH and DELETE are guarded: decorate the handlers that need it.",
    "mode": "required=False guards the requests that have a key, and no others.",
    "namespace": "All views have the namespace http: a key that is used for another view gets 422.",
    "namespaces": "Refuse the paths of other namespaces in a route before the status resource.",
    "on_conflict": "Set wait to a number of seconds.",
    "on_pending": "A repetition gets the 202 of the first request.",
    "on_store_error": "Without the store a request is answered with 503.",
    "retry_after": "Retry-After is one second.",
    "show_errors": "The text of an error is shown if the task declares it in idempotency_permanent_errors.",
    "strict": "A bare value is a key as well.",
}

T = TypeVar("T")

#: Takes what the user gave for an option, and returns the value for its field, or raises ``ValueError``.
Reader = Callable[[object], Any]


def option(default: T, read: Callable[[object], T]) -> T:
    """Declare one option: its default, which is a value of the field, and its reader."""
    # It is a Field; typed as T, a type checker accepts it as the default of a field of type T.
    declared: T = field(default=default, metadata={"read": read})
    return declared


# -- readers -----------------------------------------------------------------------------------------------------------


def accept_if(accepts: Callable[[object], bool], message: str) -> Reader:
    """Return a reader that returns a value unchanged if ``accepts(value)``, and else raises ``ValueError(message)``."""

    def read(value: object) -> object:
        if not accepts(value):
            raise ValueError(message)
        return value

    return read


def one_of(literal: object) -> Reader:
    """Return a reader of one of the words of a ``Literal``."""
    words = get_args(literal)
    return accept_if(lambda value: value in words, f"must be one of {', '.join(map(repr, words))}")


def optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    """Return a reader that takes ``None`` as well."""
    return lambda value: None if value is None else read(value)


def duration(*, at_least_ms: int = 0) -> Callable[[object], int]:
    """Return a reader of seconds or a timedelta; it returns milliseconds."""

    def read(value: object) -> int:
        found = milliseconds(value)
        if found < at_least_ms:
            raise ValueError(f"must be at least {at_least_ms / 1000} seconds")
        return found

    return read


flag = accept_if(lambda value: isinstance(value, bool), "must be True or False")
whole_number = accept_if(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "must be 0 or a positive whole number",
)


# -- options classes ---------------------------------------------------------------------------------------------------


def fields_by_option(kind: type) -> dict[str, Field[object]]:
    """Return the fields of an options class by the names of the options: the field of ``lease`` is ``lease_ms``."""
    return {each.name.removesuffix("_ms"): each for each in fields(kind)}


def read_options(
    kind: type[T], sources: Iterable[tuple[str, Mapping[str, object]]], *, prefix: str = ""
) -> T:
    """Read the options of a class from ``sources``: pairs of a place, for messages, and what was given there.

    A later source overrides an earlier one. ``prefix`` stands before the names of options in messages::

        read_options(
            HttpOptions,
            [("the setting IDEMPOTENCY_HTTP", {"lease": 60}), ("this view", {"lease": 5})],
        )
        # HttpOptions(lease_ms=5_000, …)

    Raises:
        InvalidOption: for an unknown name or a bad value, saying where it is and what is allowed.
    """
    known = fields_by_option(kind)
    values: dict[str, Any] = {}
    where = ""
    for where, given in sources:
        for name, value in given.items():
            if name not in known:
                raise unknown_option(str(name), known, where=where, prefix=prefix)
            option_field = known[name]
            try:
                values[option_field.name] = option_field.metadata["read"](value)
            except ValueError as error:
                raise InvalidOption(f"{prefix}{name} of {where} {error}.") from None
    return kind(**values)


def unknown_option(
    name: str, known: Collection[str], *, where: str, prefix: str = ""
) -> InvalidOption:
    """Return the error for a name that is no option, with what replaces it, or the option that was probably meant."""
    if replacement := REMOVED.get(prefix + name):
        return InvalidOption(f"{prefix}{name} of {where} was removed. {replacement}")
    from difflib import get_close_matches  # seldom needed, and slow to import

    close = get_close_matches(name, known, n=1)
    if close:
        hint = f"did you mean {prefix}{close[0]}?"
    else:
        hint = "known are " + ", ".join(prefix + each for each in sorted(known)) + "."
    return InvalidOption(f"{prefix}{name} of {where} is not an option: {hint}")
