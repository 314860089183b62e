"""The options of one task, from its attributes and the app's settings, checked and frozen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from celery_idempotent.errors import InvalidOption
from celery_idempotent.records import OnStale, Record, State
from celery_idempotent.settings import Snapshot, loaded, milliseconds

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "PREFIX",
    "SETTINGS",
    "ConflictPolicy",
    "Mode",
    "Policy",
    "StoreErrorPolicy",
    "check_settings",
    "is_explicit",
    "own_settings",
    "read_options",
    "snapshot",
]

ConflictPolicy = Literal["retry", "wait", "ignore", "raise"]
StoreErrorPolicy = Literal["closed", "open"]
Mode = Literal["enforce", "observe", "off"]

PREFIX: Final = "idempotency_"

#: Options that say what a call is about; :class:`~celery_idempotent.identity.identifier.Identifier` reads them.
KEY_OPTIONS: Final = (
    "key",
    "scope",
    "namespace",
    "fingerprint",
    "require_key",
    "key_before",
    "scope_before",
    "namespace_before",
)

#: Settings of the app that are no attribute of a task.
SETTINGS: Final = (
    "check_at_start",
    "replica_timeout",
    "replicas",
    "silenced_checks",
    "store",
    "sweep_interval",
)

#: Attributes of the task class with our prefix that are no options.
_METHODS: Final = ("definition", "policy", "record", "forget")

_UNSET: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one task is handled. Times are milliseconds; each field is the option ``idempotency_<field without _ms>``."""

    lease_ms: int = 60_000
    retention_ms: int = 24 * 3_600_000
    failure_retention_ms: int | None = None
    on_conflict: ConflictPolicy = "retry"
    wait_ms: int = 10_000
    conflict_backoff_max_ms: int = 60_000
    permanent_errors: tuple[type[Exception], ...] = ()
    max_crashes: int = 3
    store_result: bool = True
    max_result_bytes: int = 1024 * 1024
    serializer: str | None = None
    compression: str | None = None
    on_store_error: StoreErrorPolicy = "closed"
    on_stale: OnStale = "interrupt"
    atomic: bool = False
    publish_once: bool = False
    mode: Mode = "enforce"

    @property
    def keep_ms(self) -> int:
        """How much longer than its lease the record of an unfinished run is kept."""
        return max(self.retention_ms, self.failed_keep_ms, self.lease_ms)

    @property
    def settled_keep_ms(self) -> int:
        """How long a COMPLETED record is kept; a retention of 0 leaves a mark for one lease (see :meth:`forgets`)."""
        return self.retention_ms or self.lease_ms

    @property
    def failed_keep_ms(self) -> int:
        """How long a FAILED record is kept."""
        kept = self.failure_retention_ms
        return (self.retention_ms if kept is None else kept) or self.lease_ms

    def forgets(self, record: Record) -> bool:
        """Is this settled record but the mark of a retention of 0, and no answer for another task?"""
        if record.state is State.FAILED:
            kept = self.failure_retention_ms
            return not (self.retention_ms if kept is None else kept)
        return record.state.settled and not self.retention_ms and not record.replaced

    @classmethod
    def from_options(cls, options: Mapping[str, object], *, task: str) -> Policy:
        """Check the values that :func:`read_options` found.

        Raises:
            InvalidOption: for a bad value, saying what is allowed.
        """
        values: dict[str, object] = {}
        for name, check in _CHECKS.items():
            if name in options:
                try:
                    field, value = check(name, options[name])
                except ValueError as error:
                    raise InvalidOption(f"{PREFIX}{name} of task {task} {error}.") from None
                values[field] = value
        if values.get("atomic") and values.get("on_store_error") == "open":
            raise InvalidOption(
                f"{PREFIX}atomic of task {task} excludes {PREFIX}on_store_error='open': there is no transaction "
                "without the store's database."
            )
        return cls(**values)  # type: ignore[arg-type]  # each check returns its field's type


def read_options(task: type, setting: Callable[[str, object], object]) -> dict[str, object]:
    """Collect a task's options by their short names: the attribute wins over the app's setting.

    Functions are taken from the class as they were given: read through the instance they would be bound methods.
    ``setting(name, default)`` reads one setting of the app.

    Raises:
        InvalidOption: for an ``idempotency_*`` attribute that is no option.
    """
    options: dict[str, object] = {}
    for name in (*KEY_OPTIONS, *_CHECKS):
        value = inspect.getattr_static(task, PREFIX + name, _UNSET)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if value is _UNSET:
            value = setting(PREFIX + name, _UNSET)
        if value is not _UNSET:
            options[name] = value
    own = {PREFIX + name for name in (*KEY_OPTIONS, *_CHECKS, *_METHODS)}
    for found in dir(task):
        if found.startswith(PREFIX) and found not in own:
            raise InvalidOption(_unknown(found, f"task {getattr(task, 'name', task.__name__)}"))
    return options


def check_settings(names: list[str]) -> None:
    """Refuse settings with our prefix (lower case) that mean nothing.

    Raises:
        InvalidOption: naming the setting, and the one that was probably meant.
    """
    known = {PREFIX + name for name in (*KEY_OPTIONS, *_CHECKS, *SETTINGS)}
    for name in names:
        if name.startswith(PREFIX) and name not in known:
            raise InvalidOption(_unknown(name, "the app"))


def _unknown(name: str, where: str) -> str:
    from difflib import get_close_matches

    if name[len(PREFIX) :] in SETTINGS:
        return f"{name} is a setting of the app, not an attribute of {where}."
    known = [*KEY_OPTIONS, *_CHECKS, *SETTINGS]
    close = get_close_matches(name[len(PREFIX) :], known, n=1)
    if close:
        hint = f"did you mean {PREFIX}{close[0]}?"
    else:
        hint = "known are " + ", ".join(PREFIX + each for each in sorted(known)) + "."
    return f"{name} of {where} is not an option: {hint}"


def _duration(name: str, value: object) -> tuple[str, int]:
    return f"{name}_ms", milliseconds(value)


def _positive_duration(name: str, value: object) -> tuple[str, int]:
    duration = milliseconds(value)
    if duration < 100:
        raise ValueError("takes at least 0.1 seconds")
    return f"{name}_ms", duration


def _optional_duration(name: str, value: object) -> tuple[str, int | None]:
    return f"{name}_ms", None if value is None else milliseconds(value)


def _one_of(choices: object) -> Callable[[str, object], tuple[str, object]]:
    words = get_args(choices)

    def check(name: str, value: object) -> tuple[str, object]:
        if value not in words:
            raise ValueError(f"is one of {', '.join(map(repr, words))}")
        return name, value

    return check


def _errors(name: str, value: object) -> tuple[str, object]:
    types = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        raise ValueError("takes a tuple of exception types")
    return name, types


def _count(name: str, value: object) -> tuple[str, int]:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("takes a whole number from 0")
    return name, value


def _flag(name: str, value: object) -> tuple[str, bool]:
    if not isinstance(value, bool):
        raise ValueError("is True or False")
    return name, value


def _name(name: str, value: object) -> tuple[str, str | None]:
    if value is not None and not isinstance(value, str):
        raise ValueError("takes a name of kombu's registry")
    return name, value


_CHECKS: Final[dict[str, Callable[[str, object], tuple[str, object]]]] = {
    "lease": _positive_duration,
    "retention": _duration,
    "failure_retention": _optional_duration,
    "on_conflict": _one_of(ConflictPolicy),
    "wait": _duration,
    "conflict_backoff_max": _positive_duration,
    "permanent_errors": _errors,
    "max_crashes": _count,
    "store_result": _flag,
    "max_result_bytes": _count,
    "serializer": _name,
    "compression": _name,
    "on_store_error": _one_of(StoreErrorPolicy),
    "on_stale": _one_of(OnStale),
    "atomic": _flag,
    "publish_once": _flag,
    "mode": _one_of(Mode),
}

assert {name.removesuffix("_ms") for name in (f.name for f in fields(Policy))} == set(_CHECKS)


def snapshot(app: Celery) -> Snapshot:
    """Return the settings that the options of the app's tasks are made of."""
    return Snapshot(app, [PREFIX + name for name in (*KEY_OPTIONS, *_CHECKS)])


def own_settings(app: Celery) -> list[str]:
    """Return the app's settings with our prefix, lower-case, as the user set them in whatever form Celery takes."""
    conf = loaded(app)
    prefix = (getattr(conf, "prefix", None) or "").lower()
    found = []
    for mapping in _set_by_user(conf):
        for name in map(str, list(mapping.keys())):
            if prefix and name.lower().startswith(prefix + PREFIX):
                found.append(name.lower().removeprefix(prefix))
            elif name.startswith(PREFIX):
                found.append(name)
    return found


def is_explicit(app: Celery, name: str) -> bool:
    """Did the user set ``name``, under any spelling that Celery knows, or does it have Celery's default?"""
    conf = loaded(app)
    maps = _set_by_user(conf)
    if not maps:
        return False
    spellings = [*conf._to_keys(name)]  # noqa: SLF001  the only way to ask
    # Before 5.7, Celery keeps those of old apart.
    spellings += [spell(name) for spell in conf._keys or ()]  # noqa: SLF001
    keys = [conf._key(key) for key in spellings]  # noqa: SLF001
    return any(key in mapping for mapping in maps for key in keys)


def _set_by_user(conf: Any) -> list[Mapping[str, object]]:
    """Return all layers of the settings but the last, which holds Celery's defaults."""
    return list(getattr(conf, "maps", ()))[:-1]
