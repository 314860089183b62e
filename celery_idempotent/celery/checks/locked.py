"""The file ``keys.lock``: how each task of an app makes its keys, to be committed, and what a change of it comes to.

An operation is found by the identity that its task gives it, so a deploy that changes it has operations run again. What
the tasks were is in the file, what they are now in the app. Each old identity has to be one of the new ones::

    keys.lock   namespace, key, scope     ─┐
    the app     namespace, key, scope      ├─ the first is one of the other two: nothing runs again
                their former values       ─┘
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from celery_idempotent.celery.checks import transitions
from celery_idempotent.celery.registry import load_tasks
from celery_idempotent.identity.described import Described

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import Definition

#: The form of the file; another one is of another version of this library.
_VERSION: Final = 1

#: What a file may have at the most: some ten thousand tasks.
MAX_LOCK_BYTES: Final = 16 * 1024 * 1024

_IDENTITY: Final = ("namespace", "key", "scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """How one task makes its keys."""

    namespace: str
    key: Described
    scope: Described
    fingerprint: Described
    #: Those that key, scope or fingerprint read.
    parameters: dict[str, str]
    #: Namespace, key and scope as they were, while a deploy changes them.
    before: list[Described] | None = None

    @property
    def identity(self) -> list[Described]:
        """What decides which record is asked for."""
        return [self.namespace, self.key, self.scope]

    @property
    def identities(self) -> list[list[Described]]:
        """All under which an operation is looked for."""
        return [self.identity] if self.before is None else [self.identity, self.before]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One change of one task. ``harmless``: it changes nothing for any call, and the file only has to be written."""

    task: str
    what: str
    was: Described = None
    now: Described = None
    problem: str
    hint: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, and in sentences, what differs and is covered by a transition that a task declares."""

    differences: list[Difference]
    covered: list[str]


Lock = Mapping[str, Locked]


def lock_of(app: Celery) -> dict[str, Locked]:
    """Return what the file would say of an app's tasks; those that are switched off have no keys.

    Raises:
        InvalidOption: if an option of a task is bad; and whatever a module of the app raises.
    """
    load_tasks(app)
    found = {}
    for name, task in sorted(app.tasks.items()):
        definition = getattr(task, "idempotency_definition", lambda: None)()
        if definition is not None:
            found[str(name)] = _locked(definition)
    return found


def _locked(definition: Definition) -> Locked:
    rules = definition.identifier
    namespace, key, scope = rules.described()
    fingerprint, parameters = rules.described_fingerprint()
    before = None if rules.old_rules is None else [*rules.old_rules.described()]
    return Locked(
        namespace=namespace,
        key=key,
        scope=scope,
        fingerprint=fingerprint,
        parameters=parameters,
        before=None if before == [namespace, key, scope] else before,
    )


def lock_text(lock: Lock) -> str:
    """Return the file: sorted, so that a change of one task is a change of its lines."""
    tasks = {}
    for name in sorted(lock):
        entry = asdict(lock[name])
        before = entry.pop("before")
        if before is not None:
            entry["before"] = dict(zip(_IDENTITY, before, strict=True))
        tasks[name] = entry
    return json.dumps({"version": _VERSION, "tasks": tasks}, indent=2, ensure_ascii=False) + "\n"


def read_lock(text: bytes) -> dict[str, Locked]:
    """Return what a file says.

    Raises:
        ValueError: if it is none that this version of the library wrote.
    """
    try:
        found = json.loads(text)
        version = found["version"]
        if version == _VERSION:
            return {name: _parse_file(entry) for name, entry in found["tasks"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("it is no file of keys, or was edited") from None
    raise ValueError("another version of celery-idempotent wrote it")


def _parse_file(entry: dict[str, object]) -> Locked:
    """Return one task, every part of which has its type.

    Raises:
        ValueError: and the like, if it is malformed.
    """
    given = dict(entry)
    before = given.pop("before", None)
    if isinstance(before, dict) and sorted(before) == sorted(_IDENTITY):
        given["before"] = [before[each] for each in _IDENTITY]
    elif before is not None:
        raise ValueError
    locked = Locked(**given)  # type: ignore[arg-type]  # looked at below
    rules = [*(locked.before or ()), *locked.identity, locked.fingerprint]
    texts = [given["namespace"], *locked.parameters.values()]
    if not all(map(_is_rule, rules)) or not all(isinstance(each, str) for each in texts):
        raise ValueError
    return locked


def _is_rule(value: object) -> bool:
    """Is this a rule as it is written?"""
    match value:
        case None | str():
            return True
        case list():
            return all(isinstance(each, str) for each in value)
        case {"function": str()}:
            return True
    return False


def compare(was: Lock, now: Lock) -> Comparison:
    """Return how the tasks of an app differ from those of a file, each change with what it would do."""
    found = Comparison([], [])
    known = [identity for each in was.values() for identity in each.identities]
    looked_for = [identity for each in now.values() for identity in each.identities]
    for name in sorted({*was, *now}):
        if name in was and name in now:
            found.differences.extend(_changes(name, was[name], now[name], found.covered))
        elif name in was:
            old = was[name]
            perhaps = [new for new in now if new not in was and _same_rules(old, now[new])]
            said = transitions.removed(name, perhaps, kept=old.identity in looked_for)
            found.differences.append(Difference(task=name, what="removed", **said))
        elif now[name].identity in known or now[name].before in known:
            found.covered.append(transitions.covered(name))
        else:
            said = transitions.added(name)
            found.differences.append(Difference(task=name, what="added", harmless=True, **said))
    return found


def _same_rules(was: Locked, now: Locked) -> bool:
    """Is this the same task under another name, as far as can be seen?"""
    return (was.key, was.scope, was.parameters) == (now.key, now.scope, now.parameters)


def _changes(name: str, was: Locked, now: Locked, covered: list[str]) -> Iterator[Difference]:
    """Yield the changes of a task that is in both."""
    moved = was.identity != now.identity
    if was.identity not in now.identities:
        found = now.identity if now.before is None else now.before
        for what, old, new in zip(_IDENTITY, was.identity, found, strict=True):
            if old != new:
                gone = what != "namespace" and _removed_task(old, now)
                said = transitions.changed(name, what, old, new, gone=gone)
                yield Difference(task=name, what=what, was=old, now=new, **said)
    elif was.before is not None and was.before not in now.identities:
        for what, old, new in zip(_IDENTITY, was.before, was.identity, strict=True):
            if old != new:
                said = transitions.ended(name, what, old)
                yield Difference(task=name, what=f"{what}_before", was=old, **said)
    elif moved:
        covered.append(transitions.covered(name))
    if was.fingerprint != now.fingerprint:
        if None in (was.fingerprint, now.fingerprint):
            covered.append(transitions.uncompared(name, ends=was.fingerprint is None))
        else:
            old, new = was.fingerprint, now.fingerprint
            said = transitions.fingerprint(name, "idempotency_fingerprint", moved=moved)
            yield Difference(task=name, what="fingerprint", was=old, now=new, **said)
    elif was.identity == now.identity or was.fingerprint == "ALL_ARGUMENTS":
        yield from _parameters(name, was, now, moved=moved)


def _parameters(name: str, was: Locked, now: Locked, *, moved: bool) -> Iterator[Difference]:
    """Yield what a change of the signature comes to, where key, scope and fingerprint read the same as before."""
    old, new = was.parameters, now.parameters
    changed = sorted(each for each in {*old, *new} if old.get(each) != new.get(each))
    if not changed:
        return
    harmless = all(each not in old and new[each] != "required" for each in changed)
    if harmless:
        said = transitions.grown(name, changed)
    elif _reads(was.key, changed) or _reads(was.scope, changed):
        said = transitions.signature_changed(name, changed)
    else:
        said = transitions.fingerprint(name, f"the parameters {', '.join(changed)}", moved=moved)
    yield Difference(
        task=name, what="parameters", was={**old}, now={**new}, harmless=harmless, **said
    )


def _reads(rule: Described, changed: list[str]) -> bool:
    """Does a rule read one of these parameters?"""
    return rule == "ALL_ARGUMENTS" or isinstance(rule, dict) or not _roots(rule).isdisjoint(changed)


def _roots(rule: Described) -> set[str]:
    """Return the parameters that a rule of paths reads."""
    paths = [rule] if isinstance(rule, str) else rule if isinstance(rule, list) else []
    return {path.split(".")[0] for path in paths}


def _removed_task(was: Described, now: Locked) -> bool:
    """Did a rule read a parameter that the task has no more? Where every argument counts, that shows."""
    if now.fingerprint != "ALL_ARGUMENTS" or "any number" in now.parameters.values():
        return False
    return was != "ALL_ARGUMENTS" and not _roots(was) <= now.parameters.keys()


def accept(was: Lock, now: Lock, found: Comparison, accepted: list[str]) -> dict[str, Locked]:
    """Return the file as it is to be written: of tasks whose change is neither harmless, covered nor accepted, what it
    said before.
    """
    kept = {
        each.task for each in found.differences if not each.harmless and each.task not in accepted
    }
    return {
        name: was[name] if name in kept else now[name]
        for name in sorted({*was, *now})
        if name in kept or name in now
    }
