"""The libraries that are here and ours: on one worker, and from one publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis

from benchmarks.figures import Figure, compared
from benchmarks.libraries import installed
from benchmarks.publish import time_blocks
from benchmarks.session import Server, Session
from benchmarks.tasks import make_app
from benchmarks.worker import measure

_OURS = "by_argument"


def run(session: Session) -> Iterator[Figure]:
    """Publish blocks of all in shuffled order, then drain one queue of all with one worker."""
    names = {_OURS: "IdempotentTask, key of an argument"}
    names |= {name: peer.label for name, peer in installed().items()}
    drained = {name: (label, "plain", None) for name, label in names.items()}
    rounds = session.choose(quick=12, full=60)
    # One server for both: celery-once has one client a process, for whichever app came first.
    with session.server() as server:
        yield from _published(session, server, names)
        redis.Redis(port=server.port).flushall()
        yield from measure(session, "solo", drained, 50, rounds, peers=server)


def _published(session: Session, server: Server, names: Mapping[str, str]) -> Iterator[Figure]:
    rounds = session.choose(quick=10, full=60)
    session.steps(rounds, "peers, publishing")
    app = make_app(broker=server.url(0), backend=server.url(1), peers=True)

    def call(task: Any) -> Callable[[int], object]:
        return lambda number: task.apply_async((number,))

    calls = {name: call(app.tasks[name]) for name in ("plain", *names)}
    wall, cpu = time_blocks(session, calls, rounds)
    app.close()
    for name, label in names.items():
        yield compared("peers", f"publish: {label}", wall, cpu, name)
