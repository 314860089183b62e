"""Binds the arguments of a call to a task's parameters, and reads from them what an option names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from celery_idempotent.errors import InvalidOption


class AllArguments:
    """The type of :data:`ALL_ARGUMENTS`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ALL_ARGUMENTS"

    def __reduce__(self) -> str:
        return "ALL_ARGUMENTS"


#: As ``idempotency_key``: calls with the same arguments are one operation.
#: As ``idempotency_fingerprint``: every argument counts.
ALL_ARGUMENTS: Final = AllArguments()


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
    ) -> Bound | None:
        """Return what each parameter is given, or None: the call does not fit the signature, and the task will
        raise.
        """
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
        return Bound(self, given) if given.keys() >= self.required else None


@dataclass(slots=True)
class Bound:
    """The arguments of one call, by parameter: those given, without the defaults.

    ::

        def charge(order_id, *, amount, currency="EUR"): …

        charge.delay(17, amount=100)              given: {"order_id": 17, "amount": 100}
        charge.delay(order_id=17, amount=100)     given: the same

    Without the defaults, so that a new parameter that has one changes no fingerprint of a call that leaves it out.
    """

    parameters: Parameters
    given: Mapping[str, object]

    def get(self, name: str) -> object:
        """Return what the task's body gets as ``name``, or None."""
        return self.given.get(name, self.parameters.defaults.get(name))

    def call(self, function: Callable[..., object]) -> object:
        """Call a function with what the task's body gets, by keyword wherever that is possible."""
        parameters = self.parameters
        named: dict[str, object] = {**parameters.defaults, **self.given}
        args = [named.pop(name) for name in parameters.by_position]
        extra = named.pop(parameters.var_positional, ())
        extra_named = named.pop(parameters.var_keyword, {})
        assert isinstance(extra, tuple)
        assert isinstance(extra_named, dict)
        return function(*args, *extra, **named, **extra_named)


@dataclass(slots=True)
class PathRule:
    """``"event.id"``: the argument ``event``, then its item (of a mapping) or attribute ``id``."""

    text: str
    steps: tuple[str, ...]

    def read(self, bound: Bound) -> object:
        """Return the value at the path, or None if it leads nowhere."""
        value = bound.get(self.steps[0])
        for step in self.steps[1:]:
            value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
        return value


@dataclass(slots=True)
class NamesRule:
    """``("order_id", "kind")``: several paths, all of which must lead somewhere."""

    paths: tuple[PathRule, ...]

    def read(self, bound: Bound) -> object:
        """Return the values in the order of the option, or None if one is missing."""
        values = tuple([path.read(bound) for path in self.paths])
        return None if any(value is None for value in values) else values


@dataclass(slots=True)
class CallRule:
    """A function of the arguments."""

    function: Callable[..., object]

    def read(self, bound: Bound) -> object:
        """Return what the function returns."""
        return bound.call(self.function)


ArgumentRule = PathRule | NamesRule | CallRule | AllArguments | None


def compile_rule(option: object, parameters: Parameters, *, what: str, task: str) -> ArgumentRule:
    """Check the value of the option ``what`` against the task's parameters, once per task.

    Raises:
        InvalidOption: if the task has no argument of that name, if the function cannot take the
            task's arguments, or if the value is of another kind.
    """
    if option is None or isinstance(option, AllArguments):
        return option
    if isinstance(option, str):
        return _compile_path(option, parameters, what=what, task=task)
    if isinstance(option, (tuple, list)) and option and all(isinstance(n, str) for n in option):
        return NamesRule(
            tuple([_compile_path(name, parameters, what=what, task=task) for name in option])
        )
    if callable(option):
        _check_call(option, parameters, what=what, task=task)
        return CallRule(option)
    raise InvalidOption(
        f"{what} of task {task} is the name of an argument, a tuple of names, a function of the "
        f"arguments, ALL_ARGUMENTS or None, not {type_name(option)}."
    )


def _compile_path(text: str, parameters: Parameters, *, what: str, task: str) -> PathRule:
    steps = tuple(text.split("."))
    if "" in steps:
        raise InvalidOption(f"{what} of task {task}: {text!r} is not a name or a dotted path.")
    if steps[0] in parameters.names:
        return PathRule(text, steps)
    if parameters.var_keyword:
        return PathRule(text, (parameters.var_keyword, *steps))
    raise InvalidOption(
        f"{what} of task {task}: the task has no argument {steps[0]!r}. "
        f"It has: {', '.join(parameters.names) or 'none'}."
    )


def _check_call(
    function: Callable[..., object], parameters: Parameters, *, what: str, task: str
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    args = parameters.by_position
    variable = {parameters.var_positional, parameters.var_keyword}
    named = [name for name in parameters.names if name not in args and name not in variable]
    try:
        signature.bind(*args, **dict.fromkeys(named))
    except TypeError as error:
        call = ", ".join([*args, *(f"{name}=" for name in named)])
        raise InvalidOption(
            f"{what} of task {task}: the function gets every argument of the task ({call}), but: "
            f"{error}. Add **_ for the arguments that it does not need."
        ) from None


def type_name(value: object) -> str:
    """Return the type of a value, for messages: they must not contain the value itself."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
