"""What the rules for a key look like in a file that people read and programs compare: never a value of theirs."""

from __future__ import annotations

import functools
import hashlib
import inspect

from celery_idempotent.identity import arguments

#: A rule as JSON has it: a path, several paths, ``"ALL_ARGUMENTS"``, a function by its name and the digest of its
#: text, or nothing.
Described = str | list[str] | dict[str, str] | None


def described(rule: arguments.ArgumentRule) -> Described:
    """Return what is written about a rule."""
    match rule:
        case arguments.PathRule(text):
            return text
        case arguments.NamesRule(paths):
            return [path.text for path in paths]
        case arguments.AllArguments():
            return repr(rule)
        case arguments.CallRule(function):
            return _describe_function(function)
    return None


def described_parameters(
    parameters: arguments.Parameters,
    rules: list[arguments.ArgumentRule],
    forms: dict[str, str | None],
) -> dict[str, str]:
    """Return the parameters that count for these rules, by name: ``required``, or the digest of the default.

    ``forms`` are those of the defaults. A default may be a setting's value, and is not written.
    """
    counted: set[str] = set()
    for rule in rules:
        match rule:
            case arguments.PathRule():
                counted.add(rule.steps[0])
            case arguments.NamesRule(paths):
                counted.update(path.steps[0] for path in paths)
            case arguments.AllArguments() | arguments.CallRule():
                counted.update(parameters.names)
    return {name: _parameter(name, parameters, forms) for name in sorted(counted)}


def _parameter(name: str, parameters: arguments.Parameters, forms: dict[str, str | None]) -> str:
    if name in (parameters.var_positional, parameters.var_keyword):
        return "any number"
    if name not in parameters.defaults:
        return "required"
    form = forms.get(name)
    return "default" if form is None else f"default {_digest_of(form)}"


def _describe_function(function: object) -> dict[str, str]:
    """Return the name of a function and the digest of its text without white space, if it has one.

    The text, since bytecode differs between Python versions. Of a lambda it is that of its lines.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    found = {"function": f"{function.__module__}.{getattr(function, '__qualname__', '')}"}
    try:
        text = inspect.getsource(function)  # type: ignore[arg-type]  # raises TypeError for what has none
    except (OSError, TypeError):
        return found
    return {**found, "text": _digest_of("".join(text.split()))}


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
