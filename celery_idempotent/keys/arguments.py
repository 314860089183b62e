"""Binds the arguments of a call to a task's parameters, and reads from them what an option names."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from celery_idempotent.errors import InvalidOption


class AllArguments(enum.Enum):
    """The type of :data:`ALL_ARGUMENTS`."""

    ALL_ARGUMENTS = enum.auto()


#: As ``idempotency_key``: calls with the same arguments are one operation.
#: As ``idempotency_fingerprint``: every argument counts.
ALL_ARGUMENTS: Final = AllArguments.ALL_ARGUMENTS

#: The arguments of one call by parameter, without the defaults: a new parameter that has one changes no fingerprint.
Given = Mapping[str, object]


class Parameters:
    """The parameters of a task, and how a call fills them.

    :meth:`inspect.Signature.bind` does the same, and takes a large part of the time of a publish.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        kinds: dict[object, list[str]] = {}
        self.defaults: dict[str, object] = {}
        for name, parameter in signature.parameters.items():
            kinds.setdefault(parameter.kind, []).append(name)
            if parameter.default is not parameter.empty:
                self.defaults[name] = parameter.default
        either = kinds.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
        positional_only = kinds.get(inspect.Parameter.POSITIONAL_ONLY, [])
        self.names = tuple(signature.parameters)
        self.positional = (*positional_only, *either)
        self.by_keyword = {*either, *kinds.get(inspect.Parameter.KEYWORD_ONLY, [])}
        self.required = {*self.positional, *self.by_keyword} - self.defaults.keys()
        self.var_positional = "".join(kinds.get(inspect.Parameter.VAR_POSITIONAL, []))
        self.var_keyword = "".join(kinds.get(inspect.Parameter.VAR_KEYWORD, []))
        #: What a function of the arguments gets by position; it gets all others by keyword.
        self.by_position = self.positional if self.var_positional else tuple(positional_only)

    def bind(
        self, args: Sequence[object] | None, kwargs: Mapping[str, object] | None
    ) -> Given | None:
        """Return what each parameter is given; ``None`` if the call does not fit: the task will raise TypeError."""
        args = args or ()
        given: dict[str, object] = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional):
            if not self.var_positional:
                return None
            given[self.var_positional] = tuple(args[len(self.positional) :])
        if kwargs:
            extra: dict[str, object] = {}
            for name, value in kwargs.items():
                if name not in self.by_keyword:
                    extra[name] = value
                elif name in given:
                    return None
                else:
                    given[name] = value
            if extra:
                if not self.var_keyword:
                    return None
                given[self.var_keyword] = extra
        return given if given.keys() >= self.required else None

    def call(self, function: Callable[..., object], given: Given) -> object:
        """Call a function with what the task's body gets, by keyword wherever that is possible."""
        named: dict[str, object] = {**self.defaults, **given}
        args = [named.pop(name) for name in self.by_position]
        extra = named.pop(self.var_positional, ())
        extra_named = named.pop(self.var_keyword, {})
        assert isinstance(extra, tuple)
        assert isinstance(extra_named, dict)
        return function(*args, *extra, **named, **extra_named)


#: The name of what a function of the arguments returns.
RESULT: Final = "(the result)"


@dataclass(slots=True)
class ArgumentRule:
    """Reads a function of the arguments, or what dotted paths lead to.

    ``"event.id"`` is the argument ``event``, then its item (of a mapping) or attribute ``id``. ``single``: the option
    is a function or one path, not a tuple of paths; ``name``: it is the name of an argument.
    """

    parameters: Parameters
    function: Callable[..., object] | None
    paths: dict[str, tuple[str, ...]]
    single: bool
    name: str = ""

    def read(self, given: Given) -> object:
        """Return the value, or the tuple of all values; ``None`` if one is missing."""
        if self.name in given:
            return given[self.name]
        values = tuple(self.values(given).values())
        if self.single:
            return values[0]
        return None if any(value is None for value in values) else values

    def values(self, given: Given) -> dict[str, object]:
        """Return the value at each path, ``None`` if it leads nowhere; or what the function returns."""
        if self.function is not None:
            return {RESULT: self.parameters.call(self.function, given)}
        found = {}
        for text, (name, *steps) in self.paths.items():
            value = given[name] if name in given else self.parameters.defaults.get(name)
            for step in steps:
                value = (
                    value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
                )
            found[text] = value
        return found


def compile_rule(
    option: object, parameters: Parameters, *, what: str, task: str
) -> ArgumentRule | AllArguments | None:
    """Check the value of the option ``what`` against the task's parameters, once per task.

    Raises:
        InvalidOption: if the task has no argument of that name, if the function cannot take the
            task's arguments, or if the value is of another kind.
    """
    if option is None or isinstance(option, AllArguments):
        return option
    names = (option,) if isinstance(option, str) else option
    if isinstance(names, (tuple, list)) and names and all(isinstance(n, str) for n in names):
        paths = {text: _steps(text, parameters, f"{what} of task {task}") for text in names}
        name = option if option in parameters.names else ""
        return ArgumentRule(parameters, None, paths, single=names is not option, name=name)
    if callable(option):
        _check_call(option, parameters, f"{what} of task {task}")
        return ArgumentRule(parameters, option, {}, single=True)
    raise InvalidOption(
        f"{what} of task {task} is the name of an argument, a tuple of names, a function of the "
        f"arguments, ALL_ARGUMENTS or None, not {type_name(option)}."
    )


def _steps(text: str, parameters: Parameters, option: str) -> tuple[str, ...]:
    steps = tuple(text.split("."))
    if "" not in steps and (steps[0] in parameters.names or parameters.var_keyword):
        return steps if steps[0] in parameters.names else (parameters.var_keyword, *steps)
    names = ", ".join(parameters.names) or "none"
    raise InvalidOption(f"{option}: the task has no argument {text!r}. It has: {names}.")


def _check_call(function: Callable[..., object], parameters: Parameters, option: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        parameters.call(signature.bind, dict.fromkeys(parameters.required))
    except TypeError as error:
        raise InvalidOption(
            f"{option}: the function gets every argument of the task ({', '.join(parameters.names)}), but: {error}. "
            "Add **_ for the arguments that it does not need."
        ) from None


def type_name(value: object) -> str:
    """Return the type of a value, for messages: they must not contain the value itself."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
