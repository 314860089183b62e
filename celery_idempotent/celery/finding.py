"""Finding records: by a key as people type it, by the id of a task, by a selection.

People type less than a record's identity, so several are asked for::

    order-17            the key "order-17" without a scope, in each namespace of the app; then, by a scan, everywhere
    17                  the keys 17 (a number) and "17" (a text)
    --scope "user 3"    what the user with this primary key sent over HTTP
    4ce1…               the task id that is the key of a call without one; else the unfinished and failed records are
                        searched for this task id
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from celery_idempotent.celery.registry import definition_of, definitions
from celery_idempotent.errors import InvalidKey
from celery_idempotent.keys.rules import canonical, task_id_key
from celery_idempotent.records import Identity, Page, Record, Selection, State

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores import Store

#: What an index finds: all but COMPLETED records.
UNFINISHED_AND_FAILED = frozenset(State) - {State.COMPLETED}

#: States under the names that the CLI and the admin have for them; ``stale``: only those whose lease ran out.
STATES = {
    "live": frozenset({State.QUEUED, State.PROCESSING}),
    "stale": frozenset({State.PROCESSING}),
    **{state.value: frozenset({state}) for state in State},
}

#: So many keys one page looks at, and so many unfinished and failed records are searched for a task id.
LOOK_AT, MOST = 5_000, 10_000

#: A primary key that is no text.
_NUMBER = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)

#: The scope of a user who has a primary key that needs no escape.
_USER = re.compile(r'\["user","?([^"\\,\]]+)"?\]')


@dataclass(frozen=True, slots=True)
class Found:
    """The records that somebody may have meant; ``cut``: the search ended before all records were looked at."""

    records: Sequence[Record] = ()
    cut: bool = False


def pages(store: Store, selection: Selection, *, limit: int = 500) -> Iterator[Page]:
    """Yield page after page of the selected records; pages may be empty, and the last has no cursor."""
    cursor = ""
    while True:
        page = store.list(selection, cursor=cursor, limit=limit, look_at=LOOK_AT)
        yield page
        cursor = page.cursor
        if not cursor:
            return


def find_key(
    store: Store, namespaces: Iterable[str], text: str, scopes: Iterable[str] = ("",)
) -> list[Record]:
    """Return the records of a key as it was typed: one question a namespace, spelling and scope."""
    every = [
        Identity(namespace=namespace, scope=scope, key=key)
        for namespace in namespaces
        for scope in scopes
        for key in spellings(text)
    ]
    return [record for record in map(store.get, dict.fromkeys(every)) if record is not None]


def find_key_anywhere(
    store: Store,
    keys: Iterable[str],
    *,
    namespace: str | None = None,
    task_id: str = "",
    seconds: float | None = None,
) -> Found:
    """Return the records of a key (or of a task with this id) in every scope, as lists have them.

    All keys are looked at, in short steps, for so many ``seconds``: no index has keys without their scope, since it
    would cost each claim a write.
    """
    found: dict[Identity, Record] = {}
    wanted = frozenset(keys)
    give_up = None if seconds is None else monotonic() + seconds
    selection = Selection(
        states=frozenset(State), keys=frozenset() if task_id else wanted, namespace=namespace
    )
    for page in pages(store, selection):
        for record in page.records:
            if record.identity.key in wanted or record.task_id == task_id:
                found[record.identity] = record
        if page.cursor and give_up is not None and monotonic() > give_up:
            return Found(list(found.values()), cut=True)
    return Found(list(found.values()))


def find_task_id(store: Store, task_id: str, selection: Selection | None = None) -> Found:
    """Return the unfinished and failed records of the task of this id, of those selected: an index has them."""
    looked_at = 0
    selection = selection or Selection(states=UNFINISHED_AND_FAILED)
    for page in pages(store, selection, limit=LOOK_AT):
        found = [record for record in page.records if record.task_id == task_id]
        if found:
            return Found(read_whole(store, found))
        looked_at += page.looked_at
        if page.cursor and looked_at >= MOST:
            return Found(cut=True)
    return Found()


def read_whole(store: Store, records: Iterable[Record]) -> list[Record]:
    """Return the records with the fields that lists leave out."""
    return [found for each in records if (found := store.get(each.identity)) is not None]


# -- what people type --------------------------------------------------------------------------------------------------


def spellings(text: str, *, what: str = "key") -> list[str]:
    """Return the canonical forms that a typed text may mean: as it is, as a str, a tuple, a task id."""
    found = [text]
    with contextlib.suppress(InvalidKey, ValueError, RecursionError):
        if isinstance(parts := json.loads(text), list):
            found.append(canonical(tuple(parts), what=what, task="search"))
    with contextlib.suppress(InvalidKey):
        found.append(canonical(text, what=what, task="search"))
    if what == "key":
        found.append(task_id_key(text))
    return list(dict.fromkeys(found))


def scope_of_user(text: str) -> str | None:
    """Return the canonical scope that ``user 17`` stands for: what that user sent over HTTP. ``None``: no such text.

    Raises:
        InvalidKey: if no user can have that primary key.
    """
    word, _, pk = text.partition(" ")
    if word != "user" or not (pk := pk.strip()):
        return None
    user = ("user", int(pk) if _NUMBER.fullmatch(pk) else pk)
    return canonical(user, what="scope", task="search")


def scope_in_words(scope: str) -> str:
    """Return a scope as people write it, and may type it: ``user 17`` for what that user sent over HTTP."""
    found = _USER.fullmatch(scope)
    if found is None:
        return scope
    words = f"user {found[1]}"
    return words if scope_of_user(words) == scope else scope


def namespace_of(app: Celery, name: str) -> str | None:
    """Return the namespace of a task by its name, or of its records; ``None`` if no task of this app has it."""
    for definition in definitions(app):
        if definition.name == name:
            return definition.identifier.namespace
    return name if name in app.tasks or definition_of(app, name) is not None else None


def task_name(app: Celery, identity: Identity) -> str:
    """Return the name of the task that a record belongs to; its namespace, if no task of this app has that."""
    definition = definition_of(app, identity.namespace)
    return identity.namespace if definition is None else definition.name
