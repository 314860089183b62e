"""The options of one task, from its attributes and the app's settings, checked and frozen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from celery_idempotent.errors import InvalidOption
from celery_idempotent.protocol.options import (
    accept_if,
    duration,
    fields_by_option,
    flag,
    one_of,
    option,
    optional,
    read_options,
    unknown_option,
    whole_number,
)
from celery_idempotent.records import OnStale, Record
from celery_idempotent.settings import loaded

if TYPE_CHECKING:
    from celery import Celery

StoreErrorPolicy = Literal["closed", "open"]
Mode = Literal["enforce", "observe", "off"]
ConflictPolicy = Literal["retry", "wait", "ignore", "raise"]

PREFIX: Final = "idempotency_"

#: Options that say what a call is about; :class:`~celery_idempotent.keys.rules.Identifier` reads them.
KEY_OPTIONS: Final = (
    "key",
    "scope",
    "namespace",
    "fingerprint",
)

#: Settings of the app that are no attribute of a task.
SETTINGS: Final = (
    "store",
    "sweep_interval",
)

#: Attributes of the task class with our prefix that are no options.
_METHODS: Final = (
    "definition",
    "policy",
    "record",
    "forget",
    "release",
    "requeue",
    "complete",
    "fail",
)

_UNSET: Final = object()


def _exceptions(value: object) -> tuple[type[Exception], ...]:
    types = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        raise ValueError("must be a tuple of exception types")
    return types


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one task is handled: its options ``idempotency_<name>``.

    A line is a field, its default and its reader: ``idempotency_lease = timedelta(minutes=2)``, on the task or as a
    setting of the app, is read into ``lease_ms=120_000``. The task's own attribute wins over the setting.
    """

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
    serializer: str | None = option(
        None,
        optional(
            accept_if(lambda value: isinstance(value, str), "must be a name of kombu's registry")
        ),
    )
    on_stale: OnStale = option("interrupt", one_of(OnStale))
    publish_once: bool = option(False, flag)

    @property
    def keep_ms(self) -> int:
        """How much longer than its lease the record of an unfinished run is kept."""
        return max(self.retention_ms, self.lease_ms)

    @property
    def settled_keep_ms(self) -> int:
        """How long a settled record is kept; a retention of 0 leaves a mark for one lease (see :meth:`forgets`)."""
        return self.retention_ms or self.lease_ms

    def forgets(self, record: Record) -> bool:
        """Is this settled record but the mark of a retention of 0, and no answer for another task?"""
        if self.retention_ms or not record.state.settled:
            return False
        return record.state.is_failure or not record.replaced


_TASK_OPTIONS: Final = (*KEY_OPTIONS, *fields_by_option(Policy))
_KNOWN: Final = (*_TASK_OPTIONS, *SETTINGS)


def read_task_options(
    task: type, name: str, setting: Callable[[str, object], object]
) -> tuple[Policy, dict[str, Any]]:
    """Return the policy of a task, and those of :data:`KEY_OPTIONS` that are given: an attribute wins over a setting.

    Functions are taken from the class as they were given: read through the instance they would be bound methods.
    ``setting(name, default)`` reads one setting of the app.

    Raises:
        InvalidOption: for an ``idempotency_*`` attribute that is no option, or a bad value.
    """
    where, given = f"task {name}", dict[str, object]()
    for each in _TASK_OPTIONS:
        value = inspect.getattr_static(task, PREFIX + each, _UNSET)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if value is _UNSET:
            value = setting(PREFIX + each, _UNSET)
        if value is not _UNSET:
            given[each] = value
    own = {PREFIX + each for each in (*_TASK_OPTIONS, *_METHODS)}
    for found in dir(task):
        if found.startswith(PREFIX) and found not in own:
            if (each := found.removeprefix(PREFIX)) in SETTINGS:
                raise InvalidOption(
                    f"{found} is a setting of the app, not an attribute of {where}."
                )
            raise unknown_option(each, _KNOWN, where=where, prefix=PREFIX)
    about: dict[str, Any] = {each: given.pop(each) for each in KEY_OPTIONS if each in given}
    policy = read_options(Policy, [(where, given)], prefix=PREFIX)
    if policy.atomic and policy.on_store_error == "open":
        raise InvalidOption(
            f"{PREFIX}atomic of {where} cannot be combined with {PREFIX}on_store_error='open': without the store's "
            "database there is no transaction."
        )
    return policy, about


def refuse_unknown_settings(names: list[str]) -> None:
    """Refuse settings with our prefix (lower case) that mean nothing.

    Raises:
        InvalidOption: naming the setting, and the one that was probably meant.
    """
    for name in names:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in _KNOWN:
            raise unknown_option(name.removeprefix(PREFIX), _KNOWN, where="the app", prefix=PREFIX)


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
    # Celery < 5.7 has the old names in a mapping of their own.
    spellings += [spell(name) for spell in conf._keys or ()]  # noqa: SLF001
    keys = [conf._key(key) for key in spellings]  # noqa: SLF001
    return any(key in mapping for mapping in maps for key in keys)


def _set_by_user(conf: object) -> list[Mapping[str, object]]:
    """Return all layers of the settings but the last, which holds Celery's defaults."""
    return list(getattr(conf, "maps", ()))[:-1]
