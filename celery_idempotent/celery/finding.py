"""Finding records: by a key as people type it, by the id of a task, by a selection; and what Celery knows of a task.

::

    order-17            the key "order-17" without a scope, in each namespace of the app; then, by a scan, everywhere
    17                  the keys 17 (a number) and "17" (a text)
    --scope '["user", 3]'    requests of the user with this primary key
    4ce1…               the key of a call without one; else the task id of a record
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery_idempotent.celery.definition import definition_of, definitions
from celery_idempotent.errors import InvalidKey, InvalidOption
from celery_idempotent.keys.rules import canonical, task_id_key
from celery_idempotent.records import HTTP_NAMESPACE, Identity, Page, Record, Selection, State

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

UNFINISHED_AND_FAILED = frozenset(State) - {State.COMPLETED}

#: The names of states to choose from, each with what the admin says of it.
STATES = {
    "any": "Any state",
    "live": "Live: queued or running",
    "stale": "Stale: the lease ran out",
    **{name: name for name in State.__members__},
}

#: A length of time, as it is typed.
AGE = re.compile("([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

#: The most keys that a page looks at, and the seconds of a search for a task id in the index.
LOOK_AT, FIND_SECONDS = 5_000, 2.0
#: How long the result backend is asked about a task.
BACKEND_SECONDS = 2.0


def pages(
    store: Store,
    selection: Selection,
    *,
    cursor: str = "",
    limit: int = 500,
    seconds: float = math.inf,
) -> Iterator[Page]:
    """Yield pages of ``limit`` records, for so many ``seconds`` at most."""
    give_up = monotonic() + seconds
    while True:
        page = store.list(selection, cursor=cursor, limit=limit, look_at=LOOK_AT)
        yield page
        if not (cursor := page.cursor) or monotonic() > give_up:
            return


def look(
    store: Store, selection: Selection, *, task_id: str = "", enough: float = math.inf, **how: Any
) -> Page:
    """Return :func:`pages` as one, until it has ``enough`` records; ``task_id``: only the records of this task."""
    found: dict[Identity, Record] = {}
    looked_at = 0
    for page in pages(store, selection, **how):
        found |= {each.identity: each for each in page.records if task_id in ("", each.task_id)}
        looked_at += page.looked_at
        if len(found) >= enough:
            break
    return replace(page, records=tuple(found.values()), looked_at=looked_at)


def find(store: Store, text: str, selection: Selection, namespaces: Sequence[str]) -> list[Record]:
    """Return the records with this key; if there are none, those of this task id, without a long scan."""
    spaces = [selection.namespace] if selection.namespace else namespaces
    every = [
        Identity(namespace=namespace, scope=scope, key=key)
        for namespace in spaces
        for scope in selection.scopes or [""]
        for key in spellings(text)
    ]
    if found := read_whole(store, every):
        return found
    unfinished = replace(selection, states=UNFINISHED_AND_FAILED)
    return find_task(store, text, unfinished, FIND_SECONDS)


def find_task(store: Store, task_id: str, selection: Selection, seconds: float) -> list[Record]:
    """Return a record of this task id, by a scan of so many seconds."""
    every = replace(selection, keys=frozenset(), live=False, stale=False)
    page = look(store, every, limit=LOOK_AT, task_id=task_id, enough=1, seconds=seconds)
    return read_whole(store, [each.identity for each in page.records])


def celery_meta(app: AnyCelery, task_id: str) -> Mapping[str, Any]:
    """Return what the result backend has about a task, PENDING if nothing; empty without an answer in time."""
    found: dict[str, Any] = {}

    def ask(backend: Any) -> None:
        with contextlib.suppress(Exception):  # it fails in its own ways, or there is none
            found.update(backend.get_task_meta(task_id, cache=False))

    with contextlib.suppress(Exception):
        # A client waits up to two minutes for a server that is frozen.
        asking = threading.Thread(target=ask, args=(app.backend,), daemon=True)
        asking.start()
        asking.join(BACKEND_SECONDS)
    return dict(found)


def namespaces(app: AnyCelery) -> list[str]:
    """Return the namespace of views, then those of the app's tasks."""
    ours = sorted(each.identifier.namespace for each in definitions(app, load=True))
    return [HTTP_NAMESPACE, *ours]


def read_whole(store: Store, identities: Iterable[Identity]) -> list[Record]:
    """Return the records that exist, with the fields that lists leave out."""
    found = map(store.get, dict.fromkeys(identities))
    return [record for record in found if record is not None]


def select(app: AnyCelery, store: Store, chosen: Mapping[str, str | None]) -> Selection:
    """Return the selection of typed words, by default unfinished and FAILED records.

    Raises:
        InvalidOption: if ``since`` or ``before`` is no length of time.
    """
    task, scope, key, state = (chosen.get(name) or "" for name in ("task", "scope", "key", "state"))
    tasks = {each.name: each.identifier.namespace for each in definitions(app, load=True)}
    states = frozenset() if state or scope or key else UNFINISHED_AND_FAILED
    return Selection(
        states=frozenset({State[state]}) if state in State.__members__ else states,
        live=state == "live",
        stale=state == "stale",
        namespace=tasks.get(task, task) or None,
        scopes=frozenset(spellings(scope, what="scope") if scope else ()),
        keys=frozenset(spellings(key) if key else ()),
        error=chosen.get("error") or "",
        since_ms=_time(store, chosen.get("since")),
        before_ms=_time(store, chosen.get("before")),
    )


def _time(store: Store, age: str | None) -> int | None:
    """Return the time of so long ago, by the store's clock."""
    if not age:
        return None
    if (found := AGE.fullmatch(age)) is None:
        raise InvalidOption(f"{age!r} is not a length of time: 90s, 10m, 2h or 1d.")
    return store.now_ms() - int(found[1]) * _SECONDS[found[2]] * 1000


def spellings(text: str, *, what: str = "key") -> list[str]:
    """Return the canonical forms of a typed text: as it is, as a str, a tuple, a task id."""
    found = [text]
    with contextlib.suppress(InvalidKey, ValueError, RecursionError):
        if isinstance(parts := json.loads(text), list):
            found.append(canonical(tuple(parts), what=what, task="search"))
    with contextlib.suppress(InvalidKey):
        found.append(canonical(text, what=what, task="search"))
    if what == "key":
        found.append(task_id_key(text))
    return list(dict.fromkeys(found))


def task_name(app: AnyCelery, identity: Identity) -> str:
    """Return the name of a record's task; the namespace, if no task of this app has it."""
    definition = definition_of(app, identity.namespace)
    return identity.namespace if definition is None else definition.name
