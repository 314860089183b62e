"""Checks of the store and its servers: whether they answer, whether records are safe there, and what time it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from celery_idempotent.celery.checks.finding import Finding
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from celery_idempotent.stores import Store
    from celery_idempotent.stores.redis.facts import ServerFacts

#: The oldest releases that have the commands that the store uses.
_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}

#: How far two clocks may be apart, in milliseconds.
_APART_MS = 5_000

#: A key that no call has: no task has such a name.
_UNUSED = Identity(namespace="celery_idempotent:check", key="-")


def in_memory(store: Store) -> Iterator[Finding]:
    """Find out whether the store is one for tests."""
    if type(store).__name__ == "MemoryStore":
        yield Finding(
            id="W005",
            problem="The store is the memory of each process: two processes know nothing of each other's keys.",
            hint="Set idempotency_store to a Redis or a database; memory:// is for tests.",
        )


def unbounded_waits(store: Store) -> Iterator[Finding]:
    """Find out whether tasks would wait without end for a database server that does not answer."""
    if missing := store.missing_bounds():
        yield Finding(
            id="W020",
            problem="A database server that accepts connections and stays silent is waited for without end, or for"
            f" minutes: by tasks, and by the thread that keeps claims alive. {store!r} sets no {', '.join(missing)}.",
            hint="Set them in the OPTIONS of that database, as docs/sql.md says.",
        )


def answers(store: Store) -> list[Finding]:
    """Ask the store for a record, which needs no more rights than a worker has, and the servers about themselves."""
    try:
        store.get(_UNUSED)
        missing = store.missing_rights()
    except StoreUnavailable as error:
        return [
            Finding(
                id="E006",
                problem=f"The store does not answer, and no idempotent task runs: {error}",
                hint="Start it, or let idempotency_store say where it is.",
            )
        ]
    except StoreMisconfigured as error:
        return [
            Finding(
                id="E006",
                problem=f"The store cannot be used: {error}",
                hint="Set it up as docs/running.md says, or let idempotency_store name another.",
            )
        ]
    if missing:
        return [
            Finding(
                id="E006",
                problem=f"The store cannot be used: {store!r} refuses its user {', '.join(missing)}.",
                hint="Give the user the rights that docs/running.md lists.",
            )
        ]
    return [*_check_facts(store), *_check_clock(store)]


def _check_facts(store: Store) -> Iterable[Finding]:
    try:
        servers = store.facts()
    except IdempotencyError as error:
        return [
            Finding(
                id="W011",
                problem=f"The store does not say how it is set up: {error}",
                hint="Allow its user the command INFO, or look yourself: eviction off, persistence on.",
            )
        ]
    # Of a cluster's servers, each finding once.
    return {each.id: each for server in servers for each in _check_server(server)}.values()


def _check_clock(store: Store) -> Iterator[Finding]:
    try:
        worst = max(store.skews_ms(), key=abs, default=0)
    except IdempotencyError:
        return  # it answered a moment ago, so this is no fault of the setup
    if abs(worst) > _APART_MS:
        yield Finding(
            id="W018",
            problem=f"The store's clock is {abs(worst) / 1000:.0f} s {'ahead of' if worst > 0 else 'behind'} this"
            " machine's: by so much ETAs and deadlines miss each other, and times look wrong. If it is the store's"
            " that is wrong: when somebody sets it back, leases last longer, and a store that lost its data"
            " gives tokens out again.",
            hint="Let NTP keep both.",
        )


def _check_server(server: ServerFacts) -> Iterator[Finding]:
    """Find what makes a server forget records: memory that is full, a restart, a failover."""
    name = f"{server.kind} {server.version}"
    oldest = _OLDEST[server.kind]
    if server.release < oldest:
        yield Finding(
            id="E007",
            problem=f"{name} is too old to keep records.",
            hint=f"Use {server.kind} {'.'.join(map(str, oldest))} or newer.",
        )
    if server.eviction != "noeviction":
        yield Finding(
            id="W008",
            problem=f"{name} deletes keys when its memory is full (maxmemory-policy {server.eviction}): a task whose"
            " record was evicted runs again.",
            hint="Set maxmemory-policy noeviction, or keep records in a Redis of their own.",
        )
    if server.persistent is False:
        yield Finding(
            id="W009",
            problem=f"{name} writes nothing to disk: after a restart, everything that was completed runs again.",
            hint="Set appendonly yes, with appendfsync everysec or always.",
        )
