"""Binds the arguments of a call to a task's parameters, and reads the values that an option names."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, Final

from celery_idempotent.errors import InvalidKey, bad_option


class AllArguments(enum.Enum):
    """The type of :data:`ALL_ARGUMENTS`."""

    ALL_ARGUMENTS = enum.auto()


#: As ``idempotency_key``: equal calls are one operation. As ``idempotency_fingerprint``: every argument counts.
ALL_ARGUMENTS: Final = AllArguments.ALL_ARGUMENTS

#: For ``isinstance``: almost every mapping is a dict, and the abstract class takes a hundred times as long.
MAPPINGS: Final = (dict, Mapping)

#: The arguments of one call by parameter, without the defaults: a new parameter that has one changes no fingerprint.
Given = Mapping[str, object]


class Parameters:
    """The parameters of a task, without ``self``."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._bind, parameters = signature.bind, signature.parameters.values()
        self.names = tuple(signature.parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.defaults |= {p.name: () for p in parameters if p.kind is p.VAR_POSITIONAL}
        self.var_keyword = "".join(p.name for p in parameters if p.kind is p.VAR_KEYWORD)
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._by_keyword = {p.name for p in parameters if p.kind in by_keyword}
        self._by_position = [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
        self._required = {*self._by_position, *self._by_keyword} - self.defaults.keys()

    def bind(
        self, args: Sequence[object] | None, kwargs: Mapping[str, object] | None
    ) -> Given | None:
        """Return the argument of each parameter; ``None`` if the call does not fit: it will raise TypeError."""
        args, kwargs = args or (), kwargs or {}
        given = {**dict(zip(self._by_position, args, strict=False)), **kwargs}
        if (
            len(given) == len(args) + len(kwargs)
            and self._required <= given.keys() <= self._by_keyword
        ):
            return given  # as for most calls: inspect takes 1 % of a publish
        try:
            return self._bind(*args, **kwargs).arguments
        except TypeError:
            return None


@dataclass(slots=True)
class ArgumentRule:
    """Reads a function of the arguments, or values at paths: ``"event.id"``, an item or attribute of ``event``.

    ``single``: the option is one path, not a tuple of paths. ``where`` names option and task.
    """

    parameters: Parameters
    where: str
    function: Callable[..., object] | None = None
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    single: bool = False

    def read(self, given: Given) -> object:
        """Return the value, or the tuple of values; ``None`` if one is missing. ``InvalidKey``: a function failed."""
        if self.function is not None:
            named: dict[str, Any] = {**self.parameters.defaults, **given}
            extra = named.pop(self.parameters.var_keyword, {})
            try:
                return self.function(**named, **extra)
            except InvalidKey:
                raise
            except Exception as error:
                raise InvalidKey(
                    f"{self.where}: the function raised {type_name(error)} for the arguments of this call. Correct the "
                    "function or the call."
                ) from error
        values = tuple(self.values(given).values())
        if self.single:
            return values[0]
        # Not "None in values": an array compares itself item by item.
        return None if NoneType in map(type, values) else values

    def values(self, given: Given) -> dict[str, object]:
        """Return the value at each path, ``None`` if it leads nowhere."""
        found = {}
        for text, (name, *steps) in self.paths.items():
            value = given[name] if name in given else self.parameters.defaults.get(name)
            for step in steps:
                value = (
                    value.get(step) if isinstance(value, MAPPINGS) else getattr(value, step, None)
                )
            found[text] = value
        return found


def compile_rule(
    option: object, parameters: Parameters, *, what: str, task: str
) -> ArgumentRule | AllArguments | None:
    """Check the value of the option ``what`` against the task's parameters; raise ``InvalidOption`` for a bad one."""
    if option is None or isinstance(option, AllArguments):
        return option
    refused = partial(bad_option, what, f"task {task}", option)
    where = f"{what} of task {task}"
    names = (option,) if isinstance(option, str) else option
    known = ", ".join(parameters.names) or "none"
    if isinstance(names, (tuple, list)) and names and all(isinstance(n, str) for n in names):
        paths = {text: text.split(".") for text in names}
        for text, steps in paths.items():
            has_name = steps[0] in parameters.names
            if "" in steps or not (has_name or parameters.var_keyword):
                raise refused(
                    f"there is no argument {text!r}", f"The arguments of the task are: {known}."
                )
            if not has_name:
                steps.insert(0, parameters.var_keyword)
        return ArgumentRule(parameters, where, paths=paths, single=names is not option)
    if not callable(option):
        raise refused(
            "must be the name of an argument, a tuple of names, a function of the arguments, ALL_ARGUMENTS or None"
        )
    with suppress(ValueError):  # some callables written in C have no signature
        signature = inspect.signature(option)
        try:
            signature.bind(**{n: None for n in parameters.names if n != parameters.var_keyword})
        except TypeError as error:
            raise refused(
                f"must take every argument of the task by keyword ({known}), but: {error}",
                "Add **_ for the arguments that it does not need.",
            ) from None
    return ArgumentRule(parameters, where, option)


def type_name(value: object) -> str:
    """Return the name of a value's type, for messages, which must not contain the value."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
