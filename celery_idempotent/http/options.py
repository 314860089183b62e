"""How a view is guarded: the options of its decorator or middleware, checked and frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Final

from celery.utils.imports import symbol_by_name

from celery_idempotent.protocol.options import (
    Policy,
    accept_if,
    duration,
    flag,
    option,
    optional,
    whole_number,
)

#: The methods that need a key; the others have no effect to repeat.
METHODS: Final = frozenset(("POST", "PUT", "PATCH", "DELETE"))

#: Takes the request of the framework.
RequestFunction = Callable[..., object]

_string = accept_if(lambda value: isinstance(value, str), "must be a string")


def _callable(value: object) -> RequestFunction:
    try:
        found: object = symbol_by_name(value) if isinstance(value, str) else value
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if not callable(found) or iscoroutinefunction(found):
        raise ValueError(
            "must be a function of the request (not a coroutine function), or its dotted path"
        )
    return found


def _key(value: object) -> str | RequestFunction:
    if not isinstance(value, str):
        return _callable(value)
    if not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError("must be the name of a header, or a function of the request")
    return value


def sequence(
    accepts: Callable[[Any], bool], message: str, *, at_least: int = 1
) -> Callable[[object], tuple[Any, ...]]:
    """Return a reader of a sequence of values that ``accepts(each)``."""

    def read(value: Any) -> tuple[Any, ...]:
        is_one = isinstance(value, str) or not isinstance(value, Iterable)
        found: tuple[Any, ...] = (None,) if is_one else (*value,)
        if len(found) < at_least or not all(map(accepts, found)):
            raise ValueError(f"must be a sequence of {message}")
        return found

    return read


def _is_status(value: object) -> bool:
    return isinstance(value, int) and 100 <= value < 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The options of ``@idempotent_view`` and of the setting ``IDEMPOTENCY_HTTP``."""

    key: str | RequestFunction = option("Idempotency-Key", _key)  # type: ignore[arg-type]
    scope: RequestFunction | None = option(None, optional(_callable))
    required: bool = option(True, flag)
    authorize: RequestFunction | None = option(None, optional(_callable))
    fingerprint: RequestFunction | None = option(None, optional(_callable))
    lease_ms: int = option(30_000, duration(at_least_ms=100))
    retention_ms: int = option(24 * 3_600_000, duration())
    wait_ms: int = option(0, duration())
    unstored: tuple[int, ...] = option(
        (400, 401, 403, 405, 406, 408, 411, 413, 415, 425, 429),
        sequence(_is_status, "statuses below 500; those from 500 are never stored", at_least=0),
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
