"""A program: many greenlets on one Redis store, some killed in the middle of an exchange; does each get its answers?

``python crowding.py gevent redis://…``
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

_KINDS = ("gevent", "eventlet")
_GREENLETS, _ROUNDS, _KILLS = 40, 12, 60


def _tools() -> tuple[Callable[..., Any], Callable[..., Any], Callable[[float], None]]:
    """Patch, and return how to start a greenlet, how to kill one, and how to sleep."""
    if sys.argv[1] == "gevent":
        from gevent import monkey

        monkey.patch_all()
        import gevent

        return gevent.spawn, lambda greenlet: greenlet.kill(block=False), gevent.sleep
    import eventlet

    eventlet.monkey_patch()
    return eventlet.spawn, lambda greenlet: greenlet.kill(), eventlet.sleep


def main() -> None:
    assert sys.argv[1] in _KINDS
    spawn, kill, sleep = _tools()
    from celery_idempotent.records import (
        Claimed,
        ClaimRequest,
        Identity,
        Settled,
        SettleRequest,
        State,
        Stored,
    )
    from celery_idempotent.stores import open_store

    store = open_store(sys.argv[2])
    done: list[str] = []
    wrong: list[str] = []

    def operate(name: str) -> None:
        """Take an operation through its life; whoever gets another one's answer is wrong."""
        identity = Identity(namespace="crowding", key=name)
        about: dict[str, Any] = {"lease_ms": 30_000, "keep_ms": 30_000, "worker": name}
        answer = store.claim(
            ClaimRequest(identity=identity, attempt=os.urandom(8), task_id=name, **about)
        )
        ours = isinstance(answer, Claimed) and answer.record.task_id == name
        if not ours or answer.record.identity != identity:
            wrong.append(f"{name}: claim: {answer}")
            return
        value = Stored(content_type="t", content_encoding="e", body=name.encode())
        found = store.get(identity)
        if found is None or found.task_id != name:
            wrong.append(f"{name}: get: {found}")
        if not store.settle(
            SettleRequest(record=answer.record, state=State.COMPLETED, value=value, keep_ms=30_000)
        ):
            wrong.append(f"{name}: settle")
        again = store.claim(
            ClaimRequest(identity=identity, attempt=os.urandom(8), task_id="another", **about)
        )
        if not (isinstance(again, Settled) and again.record.value == value):
            wrong.append(f"{name}: replay: {again}")
        done.append(name)

    def work(number: int) -> None:
        for turn in range(_ROUNDS):
            operate(f"{number}-{turn}")

    crowd = [spawn(work, number) for number in range(_GREENLETS)]
    killed = 0
    for number in range(_KILLS):
        sleep(random.uniform(0, 0.004))
        victim = crowd.pop(random.randrange(len(crowd)))
        before = len(done)
        kill(victim)
        killed += 1
        crowd.append(spawn(work, _GREENLETS + number))
        assert len(done) >= before
    for greenlet in crowd:
        if sys.argv[1] == "gevent":
            greenlet.join()
        else:
            greenlet.wait()
    store.close()
    sys.stdout.write(json.dumps({"done": len(done), "killed": killed, "wrong": wrong[:5]}))


if __name__ == "__main__":
    main()
