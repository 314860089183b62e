"""Finding records: by filters, by a key as people type it, by the id of a task.

People type less than a record's identity, so several are asked for::

    order-17            the key "order-17", in each namespace of the app, in no scope
    17                  the keys 17 (a number) and "17" (a text)
    --scope "user 3"    what the user with this primary key sent over HTTP
    4ce1…               the task id that is the key of a call without one; else the unfinished and failed records are
                        searched for this task id, and then the result backend is asked for the task's arguments
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.registry import definition_of, find_task, idempotent_tasks
from celery_idempotent.errors import InvalidKey
from celery_idempotent.identity.keys import canonical, task_id_key
from celery_idempotent.operations.values import error_name
from celery_idempotent.records import Identity, Page, Record, Selection, State

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

#: What an index finds: all but COMPLETED records.
UNFINISHED_AND_FAILED = frozenset(State) - {State.COMPLETED}

#: A primary key that is no text.
_NUMBER = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)

#: The scope of a user who has a primary key that needs no escape.
_USER = re.compile(r'\["user","?([^"\\,\]]+)"?\]')

#: So many keys one page looks at, and so many unfinished and failed records are searched for a task id.
LOOK_AT, MOST = 5_000, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records are meant: those of which all that is given is true.

    ``scopes``: canonical forms of one scope as people type it. ``since_ms`` and ``before_ms``: when the record changed
    its state last, by the store's clock. ``error``: the name of a FAILED record's exception. ``worker``: a part of its
    owner's ``hostname:pid``.
    """

    states: frozenset[State] = UNFINISHED_AND_FAILED
    stale: bool = False
    namespace: str | None = None
    scopes: frozenset[str] = frozenset()
    since_ms: int | None = None
    before_ms: int | None = None
    error: str = ""
    worker: str = ""

    @property
    def selection(self) -> Selection:
        """What the store may leave out; :meth:`includes` decides."""
        (scope,) = self.scopes if len(self.scopes) == 1 else (None,)
        return Selection(
            states=self.states & {State.FAILED} if self.error else self.states,
            stale=self.stale,
            namespace=self.namespace,
            scope=scope,
            created_before_ms=self.before_ms,
        )

    @property
    def scans(self) -> bool:
        """Has every key to be looked at, since COMPLETED records have no index?"""
        return State.COMPLETED in self.selection.wanted

    def includes(self, app: AnyCelery, store: Store, record: Record) -> bool:
        """Is this one of them? Only for an error's name the store is asked again."""
        return (
            (not self.scopes or record.identity.scope in self.scopes)
            and (self.since_ms is None or record.updated_ms >= self.since_ms)
            and (self.before_ms is None or record.updated_ms < self.before_ms)
            and self.worker in record.worker
            and (not self.error or self._failed_so(app, store, record))
        )

    def _failed_so(self, app: Celery, store: Store, record: Record) -> bool:
        whole = store.get(record.identity)
        return whole is not None and error_name(app, whole) == self.error


def pages(app: AnyCelery, store: Store, wanted: Filter, *, limit: int = 500) -> Iterator[Page]:
    """Yield page after page of the records that a filter means; pages may be empty, and the last has no cursor."""
    if wanted.error and State.FAILED not in wanted.states:
        return
    cursor = ""
    while True:
        page = store.list(wanted.selection, cursor=cursor, limit=limit, look_at=LOOK_AT)
        kept = tuple(each for each in page.records if wanted.includes(app, store, each))
        cursor = page.cursor
        yield Page(records=kept, cursor=cursor, looked_at=page.looked_at, now_ms=page.now_ms)
        if not cursor:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The records that somebody may have meant, and how they were found.

    ``cut``: there are more unfinished and failed records than were searched for a task id.
    """

    records: Sequence[Record]
    how: str = ""
    cut: bool = False


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


def find_task_id(
    app: AnyCelery, store: Store, task_id: str, *, namespace: str | None = None
) -> Found:
    """Return the record that the task of this id claimed last, or those that have it as their key in any scope.

    Unfinished and failed records are found through the store's indexes. A completed one is found if the result backend
    still has the task's arguments (``result_extended=True``), of which its key is made.
    """
    looked_at, keys = 0, set(spellings(task_id))
    others: list[Record] = []
    for page in pages(app, store, Filter(namespace=namespace), limit=LOOK_AT):
        found = [record for record in page.records if record.task_id == task_id]
        if found:
            return Found(records=_whole(store, found), how="by its task id")
        others += [record for record in page.records if record.identity.key in keys]
        looked_at += page.looked_at
        if page.cursor and looked_at >= MOST:
            break
    if others:
        return Found(records=_whole(store, others), how="in a scope")
    cut = bool(looked_at >= MOST and page.cursor)
    record = _by_result_backend(app, store, task_id)
    if record is None:
        return Found(records=(), cut=cut)
    return Found(records=[record], how="by the arguments that the result backend has", cut=cut)


def _whole(store: Store, records: Iterable[Record]) -> list[Record]:
    """Return the records with what lists leave out."""
    return [found for each in records if (found := store.get(each.identity)) is not None]


def _by_result_backend(app: Celery, store: Store, task_id: str) -> Record | None:
    try:
        meta = app.backend.get_task_meta(task_id)
        task = app.tasks.get(str(meta.get("name")))
        definition = None if task is None else definition_of(app, _namespace(app, str(task.name)))
        if definition is None:
            return None
        args, kwargs = meta.get("args") or (), meta.get("kwargs") or {}
        about = definition.identifier.identify(args, kwargs, task_id=task_id)
    except Exception as error:  # noqa: BLE001  a backend fails in its own ways, and so may what it stored
        logger.debug("idempotency: the result backend does not tell of %s: %r", task_id, error)
        return None
    return store.get(about.identity)


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
    if name in app.tasks:
        return _namespace(app, name)
    return name if find_task(app, name) is not None else None


def _namespace(app: Celery, name: str) -> str:
    for task, definition in idempotent_tasks(app):
        if task.name == name:
            return definition.identifier.namespace
    return name


def task_name(app: Celery, identity: Identity) -> str:
    """Return the name of the task that a record belongs to; its namespace, if no task of this app has that."""
    task = find_task(app, identity.namespace)
    return identity.namespace if task is None else str(task.name)
