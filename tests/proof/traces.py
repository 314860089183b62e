"""Every transition of the model's records, replayed on each store at a stopped clock, each answer compared.

The model's graph has a node for each record and an edge for each question that came to it. A walk takes them all::

    node  none ── claim ──▶ PROCESSING ── claim by another: held (stays) ── a tick ──▶ stale ── claim ──▶ PROCESSING, …

What changes nothing is asked first, then one question that leads on. From a node without anything new the walk takes
the shortest way to one that has, or begins anew over an empty store.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import redis

from celery_idempotent.records import Settled
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.proof import Options, Row
from tests.proof.model import KEY, Call, Graph
from tests.proof.replay import Disagreement, Replay, Stand, graph_for
from tests.stores.shifted import FixedLink, StandingStore
from tests.support.servers import own_prefix, shared_redis_url

T = TypeVar("T")


class RedisStand(Stand):
    """Scripts read a time that stands still; what Redis would have expired meanwhile expires."""

    def __init__(self, store: Any, client: redis.Redis) -> None:
        super().__init__("Redis", store)
        self.client, self.names = client, store._keys.of_record(KEY)
        self.link = store._link = FixedLink(store._link, client, f"{store.prefix}-clock")
        self.link.set(self.clock())

    def pass_time(self, ms: int) -> None:
        super().pass_time(ms)
        self.link.set(self.clock())
        expire(self.client, self.names[0], ms)

    def flush(self) -> None:
        self.client.delete(*self.names)


def expire(client: redis.Redis, name: bytes, ms: int) -> None:
    """Let a key's time pass."""
    left: Any = client.pttl(name)
    if left - ms > 0:
        client.pexpire(name, left - ms)
    elif left >= 0:
        client.delete(name)


class SQLStand(Stand):
    """The expression for the database's time is a number."""

    def __init__(self, name: str, store: Any) -> None:
        super().__init__(name, store)
        self.pass_time(0)

    def pass_time(self, ms: int) -> None:
        from tests.sql import databases

        super().pass_time(ms)
        databases.stop(self.store, self.clock())

    def flush(self) -> None:
        from tests.sql import databases

        databases.clear(self.store.alias)


class HybridStand(Stand):
    """A memory behind a cache that is away, deaf, late or empty whenever chance wants it."""

    def __init__(self, store: Any, client: redis.Redis, clock: FakeClock) -> None:
        super().__init__("hybrid, its cache broken", store, clock)
        self.client, self.name_of_entry = client, store.cache._name(KEY)

    def pass_time(self, ms: int) -> None:
        super().pass_time(ms)
        expire(self.client, self.name_of_entry, ms)

    def flush(self) -> None:
        super().flush()
        self.fault(random.Random(0))
        self.store.cache._link.thaw()
        self.client.delete(self.name_of_entry)

    def fault(self, chance: random.Random) -> None:
        cache = self.store.cache
        cache.away_until = 0.0
        mode = chance.choice(["well", "well", "well", "away", "deaf", "frozen", "flush"])
        if cache._link.mode == "frozen":
            cache._link.thaw()
        if mode == "flush":
            self.client.delete(self.name_of_entry)
        cache._link.mode = "well" if mode == "flush" else mode

    def same(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Settled) and isinstance(theirs, Settled):
            # A cache knows about how old it is, and leaves its own task to the store.
            return replace(ours.record, delivered=theirs.record.delivered) == theirs.record
        return bool(ours == theirs)


STORES = ("memory", "redis", "sqlite", "hybrid", "postgresql", "mariadb")


@contextlib.contextmanager
def opened(name: str) -> Iterator[Stand]:
    """Open a store of the kind, empty, and remove it afterwards."""
    with contextlib.ExitStack() as stack:
        if name == "memory":
            clock = FakeClock()
            yield Stand(name, MemoryStore(clock), clock)
        elif name in ("redis", "hybrid"):
            url = stack.enter_context(shared_redis_url())
            client = redis.Redis.from_url(url)
            stack.callback(client.close)
            prefix = stack.enter_context(own_prefix(client))
            if name == "redis":
                store: Any = StandingStore(url, prefix=prefix)
                stack.callback(store.close)
                yield RedisStand(store, client)
            else:
                from celery_idempotent.django.hybrid import Cache
                from tests.stores.hybrids import BadLink, MemoryHybrid

                cache: Any = Cache(f"{url}?prefix={prefix}&socket_timeout=5")
                cache._link, clock = BadLink(cache._link), FakeClock()
                stack.callback(cache.close)
                yield HybridStand(MemoryHybrid(cache, clock), client, clock)
        else:
            yield stack.enter_context(_database(name))


@contextlib.contextmanager
def _database(vendor: str) -> Iterator[Stand]:
    from celery_idempotent.django.store import DjangoStore
    from tests.sql import databases

    alias = f"proof_{vendor}"
    with (
        tempfile.TemporaryDirectory() as directory,
        databases.fresh(vendor, Path(directory), alias),
        contextlib.closing(DjangoStore(alias)) as store,
    ):
        yield SQLStand(vendor, store)


@dataclass
class Walked:
    """How many transitions a walk took, of how many, by how many questions."""

    taken: int = 0
    of: int = 0
    asked: int = 0
    seconds: float = 0.0
    broken: str = ""


def walk(
    graph: Graph,
    stand: Stand,
    *,
    seed: int = 1,
    seconds: float = 1e9,
    kind: Callable[[int], object] = int,
) -> Walked:
    """Take every question to each ``kind`` of record, in an order that chance chooses; end after so many seconds."""
    began, replay, chance = time.monotonic(), Replay(stand, seed), random.Random(seed)
    left: dict[int, list[Call]] = {}
    kinds: set[object] = set()
    for node in chance.sample(sorted(graph), len(graph)):
        for call in chance.sample(sorted(graph[node], key=repr), len(graph[node])):
            # A settle that meets a record has no more of its claim than the token.
            each = kind(node), call._replace(claim=call.claim if not node else call.claim > 0)
            if kind is int or each not in kinds:
                kinds.add(each)
                left.setdefault(node, []).append(call)
    nexts = {node: dict.fromkeys(edges.values()) for node, edges in graph.items()}
    how = {(node, after): call for node, edges in graph.items() for call, after in edges.items()}
    walked = Walked(of=sum(map(len, left.values())))
    try:
        replay.begin()
        while left and time.monotonic() < began + seconds:
            node = replay.node
            if node in left:
                calls = left.pop(node)
                quiet = [call for call in calls if graph[node][call] == node]
                loud = [call for call in calls if graph[node][call] != node]
                walked.taken += len(quiet) + bool(loud)
                for call in quiet:
                    replay.ask(call, look=False)
                replay.look()
                if loud:
                    replay.ask(loud.pop())
                if loud:
                    left[node] = loud
            elif (way := _way(nexts, node, left)) is not None:
                for before, after in itertools.pairwise(way):
                    replay.ask(how[before, after])
                    if replay.node != after:
                        del nexts[before][after]  # it was about to die, or the other way round
                        break
            elif node:
                replay.begin()
            else:
                break
    except Disagreement as disagreement:
        walked.broken = str(disagreement)
    walked.asked, walked.seconds = replay.asked, time.monotonic() - began
    return walked


def _way(nexts: dict[int, Any], start: int, left: dict[int, Any]) -> list[int] | None:
    """Return the shortest way to a node that has anything left."""
    came: dict[int, int] = {start: start}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if node in left:
            way = [node]
            while way[-1] != start:
                way.append(came[way[-1]])
            return way[::-1]
        for after in nexts.get(node, ()):
            if after not in came:
                came[after] = node
                queue.append(after)
    return None


def run(options: Options) -> list[Row]:
    seconds = 3600.0 if options.full else 45.0
    graphs = {name: graph_for(name) for name in STORES}

    def do(name: str) -> Walked:
        logging.disable()  # a cache that is broken on purpose warns
        with opened(name) as stand:
            return walk(graphs[name], stand, seed=options.seed, seconds=seconds)

    return rows_of(
        "traces",
        on_each(do),
        lambda each: f"{each.taken:,} of {each.of:,} transitions, {each.asked:,} answers",
    )


def on_each(do: Callable[[str], T], names: Sequence[str] = STORES) -> list[tuple[str, T]]:
    """Do something with each store, two at a time, in processes that have what this one has."""
    with ThreadPool(2) as threads:
        return list(zip(names, threads.map(partial(_forked, do), names, 1), strict=True))


def _forked(do: Callable[[str], T], name: str) -> T:
    ours, theirs = Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: theirs.send(do(name)))
    process.start()
    theirs.close()
    try:
        done: T = ours.recv()
    except EOFError:
        raise RuntimeError(f"the process that asked {name} ended without a result") from None
    process.join()
    return done


def rows_of(part: str, done: list[tuple[str, Any]], much: Callable[[Any], str]) -> list[Row]:
    return [
        Row(
            name=f"{part}: {name}",
            what="the model's transitions"
            if part == "traces"
            else "pairs of verbs, at every position",
            how_many=much(each),
            found=each.broken or "every answer as by the table",
            command=f"python -m tests.proof {part}",
            held=not each.broken,
        )
        for name, each in done
    ]
