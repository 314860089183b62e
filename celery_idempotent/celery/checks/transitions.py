"""What is said about a change of a task's keys: what it would do to calls in flight, and the transition to use."""

from __future__ import annotations

from typing import TypedDict

from celery_idempotent.identity.described import Described

_ACCEPT = "If that is past, or the keys stay the same, write the file with --write --accept {}."


class Explanation(TypedDict):
    """The two halves of a finding."""

    problem: str
    hint: str


def added(name: str) -> Explanation:
    """Say what a task that the file does not have means."""
    return Explanation(
        problem=f"{name} is not in the file. It is new to it: no call in flight has a key of this task.",
        hint="Write the file with --write, so that later changes are seen.",
    )


def removed(name: str, perhaps: list[str], *, kept: bool) -> Explanation:
    """Say what a task that only the file has means.

    ``perhaps``: the tasks that it may be now. ``kept``: another task looks for its records.
    """
    looks = f" It looks as if it were {perhaps[0]} now." if len(perhaps) == 1 else ""
    effect = "Workers discard messages of a name that they do not know"
    if not kept:
        effect += (
            "; under another name, each operation that is repeated after the deploy runs again"
        )
    new = perhaps[0] if len(perhaps) == 1 else "the new task"
    before = "" if kept else f"let {new} say idempotency_namespace_before={name!r}, and "
    return Explanation(
        problem=f"{name} is gone, renamed, or no longer protected.{looks} {effect}.",
        hint=f"If it was renamed, {before}keep a task {name} as long as such messages may come "
        f"(docs/deploying.md, Renaming a task). {_ACCEPT.format(name)}",
    )


def changed(name: str, what: str, was: Described, now: Described, *, gone: bool) -> Explanation:
    """Say what a namespace, key or scope that changes does; ``gone``: it read a parameter that is no more."""
    if what == "namespace":
        effect = "Messages that are delivered again and calls that are repeated after the deploy find no record"
    else:
        effect = "Messages in flight keep their keys; a call that is repeated after the deploy has another one"
    hint = f"Set idempotency_{what}_before={_option(was)} for one retention (docs/deploying.md, Changing keys). "
    if gone:
        hint = "Keep the parameter, or if it was renamed and has the same values, accept it. "
    return Explanation(
        problem=f"The {what} of {name} changes from {_said(was)} to {_said(now)}{_same_name(was, now)}. {effect}, "
        "and the operation runs again.",
        hint=hint + _ACCEPT.format(name),
    )


def ended(name: str, what: str, was: Described) -> Explanation:
    """Say what a transition that is taken out does."""
    return Explanation(
        problem=f"{name} no longer says idempotency_{what}_before={_option(was)}. Messages and calls of the version "
        "before that, and repetitions of what it did, run again.",
        hint="Leave it in until one retention after the last worker and publisher of that version has ended "
        "(docs/deploying.md, Changing keys). " + _ACCEPT.format(name),
    )


def fingerprint(name: str, what: str, *, moved: bool) -> Explanation:
    """Say what another fingerprint does, and another key (``moved``) together with it."""
    begin = f"{name} changes {what}, and so the fingerprints of calls. "
    if moved:
        return Explanation(
            problem=f"{begin}Its key changes as well, and an old record with another fingerprint does not count: each "
            "operation that is repeated after the deploy runs again.",
            hint="Change the key in one deploy and the fingerprint in another one. "
            + _ACCEPT.format(name),
        )
    return Explanation(
        problem=f"{begin}Messages in flight keep theirs; a call that is repeated after the deploy is refused with "
        "FingerprintMismatch, and does not run.",
        hint="Set idempotency_fingerprint=None for one retention, and then the new one (docs/deploying.md, Changing "
        "signatures). " + _ACCEPT.format(name),
    )


def signature_changed(name: str, parameters: list[str]) -> Explanation:
    """Say what a change of parameters does to a key that is made of them."""
    return Explanation(
        problem=f"{name} makes its keys of parameters that change: {', '.join(parameters)}. A call that is repeated "
        "after the deploy has another key, and the operation runs again.",
        hint="No option reads both. Leave this task as it is, and give the new signature a new task "
        "(docs/deploying.md, Changing signatures). " + _ACCEPT.format(name),
    )


def grown(name: str, parameters: list[str]) -> Explanation:
    """Say what parameters with a default do."""
    return Explanation(
        problem=f"{name} has new parameters that calls may leave out: {', '.join(parameters)}. Keys and fingerprints "
        "stay the same.",
        hint="Write the file with --write.",
    )


def covered(name: str) -> str:
    """Say that a change does no harm."""
    return f"{name} changes its keys, and says what they were: nothing runs again."


def uncompared(name: str, *, ends: bool) -> str:
    """Say what a fingerprint does that comes after none, or none that comes after one."""
    if ends:
        return f"{name} compares fingerprints from now on; records without one are not compared."
    return f"{name} compares no fingerprints: two calls with one key are one operation, whatever their arguments."


def _option(rule: Described) -> str:
    """Return a rule as it is written in Python."""
    match rule:
        case "ALL_ARGUMENTS":
            return rule
        case list():
            return repr(tuple(rule))
        case dict():
            return f"<the old {rule.get('function')}>"
    return repr(rule)


def _said(rule: Described) -> str:
    return f"the function {rule['function']}" if isinstance(rule, dict) else _option(rule)


def _same_name(was: Described, now: Described) -> str:
    if isinstance(was, dict) and isinstance(now, dict) and was["function"] == now["function"]:
        return " with another text"
    return ""
