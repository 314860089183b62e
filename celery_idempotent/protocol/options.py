"""Declares the options of tasks and views: each has a default, and a reader for the user's value.

The options are the fields of a frozen dataclass, an options class: :class:`Policy` for a task, ``HttpOptions`` for a
view. The user gives the option ``lease`` in seconds, the field has milliseconds::

    lease_ms: int = option(60_000, duration(at_least_ms=100))

A reader refuses a value by raising a ``ValueError`` with the end of a sentence; :func:`read_options` adds the rest::

    "must be at least 0.1 seconds"  →  idempotency_lease of task shop.charge is 0.01, and must be at least 0.1 seconds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from celery_idempotent.errors import InvalidOption, bad_option
from celery_idempotent.records import OnStale
from celery_idempotent.settings import PREFIX

T = TypeVar("T")

#: Takes the user's value of an option, and returns the value of its field, or raises ``ValueError``.
Reader = Callable[[object], Any]


def option(default: T, read: Callable[[object], T]) -> T:
    """Declare an option by the default value of its field and its reader."""
    return field(default=default, metadata={"read": read})


def accept_if(accepts: Callable[[object], bool], message: str) -> Reader:
    """Return a reader of values that ``accepts(value)``; it raises ``ValueError(message)`` for others."""

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
    """Return a reader of seconds or a timedelta; it returns milliseconds, rounded up."""

    def read(value: object) -> int:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError("must be seconds or a timedelta")
        if not 0 <= value <= 10 * 365 * 86_400:  # nor is NaN
            raise ValueError("must be a time between 0 and ten years")
        if value * 1000 < at_least_ms:
            raise ValueError(f"must be at least {at_least_ms / 1000} seconds")
        return math.ceil(value * 1000)

    return read


flag = accept_if(lambda value: isinstance(value, bool), "must be True or False")
whole_number = accept_if(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "must be 0 or a positive whole number",
)


def fields_by_option(kind: type) -> dict[str, Field[object]]:
    """Return the fields of an options class by the names of the options: the field of ``lease`` is ``lease_ms``."""
    return {each.name.removesuffix("_ms"): each for each in fields(kind) if each.init}


def read_options(
    kind: type[T], sources: Iterable[tuple[str, Mapping[str, object]]], *, prefix: str = ""
) -> T:
    """Read an options class from ``sources``: pairs of a place, for messages, and the user's values there.

    A later source overrides an earlier one.

    Raises:
        InvalidOption: for an unknown name or a bad value, saying where it is and what is allowed.
    """
    known = fields_by_option(kind)
    values: dict[str, Any] = {}
    for where, given in sources:
        refuse_unknown(given, known, where=where, prefix=prefix)
        for name, value in given.items():
            read_value = known[name].metadata["read"]
            try:
                values[known[name].name] = read_value(value)
            except ValueError as error:
                raise bad_option(prefix + name, where, value, str(error)) from None
    return kind(**values)


def refuse_unknown(
    names: Iterable[str], known: Collection[str], *, where: str, prefix: str = ""
) -> None:
    """Raise :exc:`InvalidOption` for the first unknown name, with the option that was probably meant."""
    unknown = [str(each) for each in names if each not in known]
    if not unknown:
        return
    from difflib import get_close_matches  # seldom needed, and slow to import

    close = [prefix + each for each in get_close_matches(unknown[0], known, 1) or sorted(known)]
    hint = f"did you mean {close[0]}?" if len(close) == 1 else f"known are {', '.join(close)}."
    raise InvalidOption(f"{prefix}{unknown[0]} of {where} is not an option: {hint}")


StoreErrorPolicy = Literal["closed", "open"]
Mode = Literal["enforce", "observe", "off"]
ConflictPolicy = Literal["retry", "wait", "ignore", "raise"]
PublishOnce = Literal[False, True, "until_start"]
DuplicatePolicy = Literal["return", "raise", "replace"]

#: Options that identify a call; :class:`~celery_idempotent.keys.rules.Identifier` reads them.
KEY_OPTIONS: Final = ("key", "scope", "namespace", "fingerprint")

#: Settings of the app that are no option of a task.
SETTINGS: Final = ("store", "sweep_interval")

#: Attributes of the task class with our prefix that are no options.
_METHODS: Final = frozenset(
    {"definition", "policy", "record", "forget", "release", "requeue", "complete", "fail"}
)

_UNSET: Final = object()

_serializer = accept_if(lambda value: isinstance(value, str), "must be a name of kombu's registry")


def _exceptions(value: object) -> tuple[type[Exception], ...]:
    types = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        raise ValueError("must be a tuple of exception types")
    return types


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options of one task but :data:`KEY_OPTIONS`, and what follows from them."""

    lease_ms: int = option(60_000, duration(at_least_ms=100))
    retention_ms: int = option(24 * 3_600_000, duration())
    wait_ms: int = option(10_000, duration())
    max_crashes: int = option(3, whole_number)
    on_store_error: StoreErrorPolicy = option("closed", one_of(StoreErrorPolicy))
    atomic: bool = option(False, flag)
    mode: Mode = option("enforce", one_of(Mode))
    on_conflict: ConflictPolicy = option("retry", one_of(ConflictPolicy))
    permanent_errors: tuple[type[Exception], ...] = option((), _exceptions)
    store_result: bool = option(True, flag)
    max_result_bytes: int = option(1024 * 1024, whole_number)
    serializer: str | None = option(None, optional(_serializer))
    on_stale: OnStale = option("interrupt", one_of(OnStale))
    publish_once: PublishOnce = option(False, one_of(PublishOnce))
    on_duplicate: DuplicatePolicy = option("return", one_of(DuplicatePolicy))
    keep_message: bool = option(False, flag)

    #: How much longer than its lease the record of an unfinished run is kept.
    keep_ms: int = field(init=False)
    #: How long a settled record is kept; a retention of 0 leaves a mark for one lease.
    settled_keep_ms: int = field(init=False)
    #: Is a settled record only a mark, which answers redeliveries of its own task and no other call?
    each_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        set_once, retention_ms = partial(object.__setattr__, self), self.retention_ms
        set_once("keep_ms", max(retention_ms, self.lease_ms))
        set_once("settled_keep_ms", retention_ms or self.lease_ms)
        set_once("each_runs", not retention_ms or self.publish_once == "until_start")


_TASK_OPTIONS: Final = (*KEY_OPTIONS, *fields_by_option(Policy))
#: All options and settings, without our prefix.
KNOWN: Final = (*_TASK_OPTIONS, *SETTINGS)


def read_task_options(
    task: type, name: str, setting: Callable[[str, object], object]
) -> tuple[Policy, dict[str, Any]]:
    """Return the policy of a task and the given :data:`KEY_OPTIONS`; an attribute wins over a setting.

    ``setting(name, default)`` reads one setting of the app.

    Raises:
        InvalidOption: for an ``idempotency_*`` attribute that is no option, or a bad value.
    """
    where, given = f"task {name}", dict[str, Any]()
    for each in _TASK_OPTIONS:
        # Not through an instance, which would bind functions.
        value = inspect.getattr_static(task, PREFIX + each, _UNSET)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if value is not _UNSET or (value := setting(PREFIX + each, _UNSET)) is not _UNSET:
            given[each] = value
    named = [each.removeprefix(PREFIX) for each in dir(task) if each.startswith(PREFIX)]
    unknown = [each for each in named if each not in _METHODS]
    refuse_unknown(unknown, _TASK_OPTIONS, where=where, prefix=PREFIX)
    about: dict[str, Any] = {each: given.pop(each) for each in KEY_OPTIONS if each in given}
    policy = read_options(Policy, [(where, given)], prefix=PREFIX)
    if policy.on_duplicate == "replace" and policy.publish_once != "until_start":
        problem = f"needs {PREFIX}publish_once='until_start': only a call that waits can take other arguments"
        raise bad_option(f"{PREFIX}on_duplicate", where, "replace", problem, "Set both.")
    if policy.atomic and policy.on_store_error == "open":
        problem = (
            f"needs {PREFIX}on_store_error='closed': without its database there is no transaction"
        )
        raise bad_option(f"{PREFIX}atomic", where, True, problem, "Leave out one of them.")
    return policy, about
