"""The faults: where each strikes, what it can explain, how long it lasts, how it begins and how it is healed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from tests.proof.chaos.tasks import LEASE
from tests.support.workers import freeze

if TYPE_CHECKING:
    from tests.proof.chaos.arena import Arena
    from tests.proof.chaos.servers import Server

Strike = Callable[["Arena", float], Any]


class Fault(NamedTuple):
    """``explains``: a run ``died``, was ``frozen``, met its ``limit``; ``away`` is a store, data are ``lost``.

    ``begin`` returns the process ids that it strikes, or the key of its call. ``chance`` chooses among targets.
    """

    name: str
    lane: str
    explains: str
    seconds: tuple[float, float]
    only: tuple[str, ...]
    begin: Strike
    heal: Strike = lambda _, __: None


_REDIS, _SQL = ("redis", "cluster", "sentinel", "hybrid"), ("postgresql", "mariadb", "hybrid")
_ALONE, _PROXIED = ("redis", "hybrid"), ("redis", "postgresql", "mariadb", "hybrid")
_NOW, _BRIEFLY, _AWHILE = (0.0, 0.2), (0.5, 1.0), (1.0, 4.0)
#: Longer than a claim tries: three seconds, and five more if the store is silent.
_LONG = (4.0, 9.0)
#: Longer than a lease.
_FROZEN = (LEASE + 1.0, LEASE + 4.0)


def send(pids: list[int], number: int = signal.SIGKILL) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def _to_main(number: int) -> Strike:
    def begin(arena: Arena, chance: float) -> list[int]:
        pids: list[int] = arena.pids(chance)
        send(pids[:1], number)
        return pids

    return begin


def _terminate_twice(arena: Arena, chance: float) -> list[int]:
    pids: list[int] = _to_main(signal.SIGTERM)(arena, chance)
    time.sleep(0.3)
    send(pids[:1], signal.SIGTERM)
    return pids


def _freeze(arena: Arena, pids: list[int]) -> list[int]:
    arena.frozen = pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            freeze(pid)
    return pids


def _thaw(arena: Arena, _: float) -> None:
    send(arena.frozen, signal.SIGCONT)


def _limit(**options: float) -> Strike:
    def begin(arena: Arena, chance: float) -> str:
        key: str = arena.call(chance, hangs=True, options=options)
        return key

    return begin


def _call_again(arena: Arena, chance: float) -> None:
    """The caller hears of the failure, and calls again."""
    arena.call(chance, options={"countdown": 1})


def _revoke(arena: Arena, chance: float) -> None:
    how, ids = ("SIGKILL" if chance < 0.5 else "SIGTERM"), arena.results(chance)
    with contextlib.suppress(Exception):  # the broker may be away
        arena.app.control.revoke(ids, terminate=True, signal=how)
    _call_again(arena, chance)


def _slow(arena: Arena, chance: float) -> None:
    """Have it stand still for two thirds of each tenth of a second."""
    until, server = time.monotonic() + 2, arena.store(chance)

    def stutter() -> None:
        while time.monotonic() < until:
            server.signal(signal.SIGSTOP)
            time.sleep(0.06)
            server.signal(signal.SIGCONT)
            time.sleep(0.03)

    threading.Thread(target=stutter).start()


def _ask(server: Server, *command: object) -> Any:
    with contextlib.suppress(redis.RedisError):
        return server.client().execute_command(*command)


def _ask_aside(server: Server, *command: object) -> None:
    threading.Thread(target=_ask, args=(server, *command), daemon=True).start()


def _load(arena: Arena, chance: float) -> None:
    server = arena.redis(chance)
    delay = "key-load-delay 500 loading-process-events-interval-bytes 1024"
    _ask(server, "CONFIG", "SET", *delay.split())
    _ask_aside(server, "DEBUG", "RELOAD")


def _fill_disk(arena: Arena, chance: float) -> None:
    server = arena.redis(chance)
    _ask(server, "CONFIG", "SET", "appendfsync", "everysec")  # with "always" it would end
    for each in server.processes():
        each.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))


def _empty_disk(arena: Arena, chance: float) -> None:
    server = arena.redis(chance)
    for each in server.processes():
        each.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    time.sleep(1.2)  # it tries once a second
    _ask(server, "CONFIG", "SET", "appendfsync", "always")


def _kill_clients(arena: Arena, chance: float) -> None:
    for server in arena.servers.stores:
        if server.kind == "redis":
            _ask(server, "CLIENT", "KILL", "TYPE", "normal")


def _migrate_slot(arena: Arena, chance: float) -> None:
    """Move the slot of a key in use to another node, while it is asked for."""
    # Asked until each has answered: of a slot that stays between two nodes no script gets both of its keys.
    how: Any = {"retry": Retry(ConstantBackoff(0.2), 100), "retry_on_error": [redis.RedisError]}
    nodes = [redis.Redis(port=each.port, **how) for each in arena.servers.stores]
    source, target = nodes[int(chance * 3)], nodes[(int(chance * 3) + 1) % 3]
    slot = source.execute_command("CLUSTER", "KEYSLOT", source.randomkey() or "")
    ids = [str(node.execute_command("CLUSTER", "MYID"), "ascii") for node in (source, target)]
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    port = target.connection_pool.connection_kwargs["port"]
    while keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 2):
        source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "REPLACE", "KEYS", *keys)
    for node in (target, source, *nodes):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def _kill_sessions(arena: Arena, chance: float) -> None:
    if arena.servers.stores[0].kind == "postgres":
        sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        arena.query(f"{sql} AND backend_type = 'client backend'")
    else:
        for (number,) in arena.query("SELECT id FROM information_schema.processlist"):
            with contextlib.suppress(Exception):  # it has ended, or is this one
                arena.query(f"KILL {number}")


def _end_silence(arena: Arena, chance: float) -> None:
    # psycopg waits for an answer that is lost until its connection is closed.
    arena.store(chance).proxy.heal()
    if arena.servers.databases:
        arena.store(chance).proxy.cut()


_HEAL: dict[str, Strike] = {
    "store": lambda a, c: a.store(c).proxy.heal(),
    "broker": lambda a, _: a.servers.broker.proxy.heal(),
}
# fmt: off
FAULTS = (
    Fault("child killed", "worker", "died", _NOW, (), lambda a, c: send([a.child(c)])),
    Fault("worker killed", "worker", "died", _NOW, (), _to_main(signal.SIGKILL)),
    Fault("group killed", "worker", "died", _NOW, (), lambda a, c: send(a.pids(c))),
    Fault("terminated twice", "worker", "died", _NOW, (), _terminate_twice),
    Fault("cold shutdown", "worker", "died", _NOW, (), _to_main(signal.SIGQUIT)),
    Fault("restarted at once", "worker", "nothing", _NOW, (), lambda a, c: a.succeed(c)),
    Fault("child frozen", "worker", "frozen", _FROZEN, (), lambda a, c: _freeze(a, [a.child(c)]), _thaw),
    Fault("worker frozen", "worker", "frozen", _FROZEN, (), lambda a, c: _freeze(a, a.pids(c)), _thaw),
    Fault("soft time limit", "worker", "limit", (3, 4), (), _limit(soft_time_limit=1), _call_again),
    Fault("hard time limit", "worker", "limit", (2, 3), (), _limit(time_limit=1)),
    Fault("revoked", "worker", "limit", (1.5, 2.5), (), _limit(), _revoke),

    Fault("store killed", "store", "away", (0, 3), (),
          lambda a, c: a.store(c).kill(), lambda a, c: a.store(c).start()),
    Fault("store frozen", "store", "away", _LONG, (),
          lambda a, c: a.store(c).signal(signal.SIGSTOP), lambda a, c: a.store(c).signal(signal.SIGCONT)),
    Fault("store slow", "store", "away", (2, 2), (), _slow),
    Fault("requests lost", "store", "away", _BRIEFLY, _PROXIED,
          lambda a, c: a.store(c).proxy.lose_requests(b"", times=8), _HEAL["store"]),
    Fault("requests late", "store", "away", _LONG, _PROXIED,
          lambda a, c: a.store(c).proxy.hold_requests(b"", times=4), _HEAL["store"]),
    Fault("answers lost", "store", "away", _BRIEFLY, _PROXIED,
          lambda a, c: a.store(c).proxy.swallow_replies(b"", times=8), _HEAL["store"]),
    Fault("answers lost in silence", "store", "away", _LONG, _PROXIED,
          lambda a, c: a.store(c).proxy.swallow_replies(b"", times=4, silent=True), _end_silence),
    Fault("store unreachable", "store", "away", _AWHILE, _PROXIED,
          lambda a, c: a.store(c).proxy.refuse(), _HEAL["store"]),
    Fault("busy script", "store", "away", _AWHILE, _REDIS,
          lambda a, c: _ask_aside(a.redis(c), "EVAL", "while true do end", 0),
          lambda a, c: _ask(a.redis(c), "SCRIPT", "KILL")),
    Fault("out of memory", "store", "away", _AWHILE, _REDIS,
          lambda a, c: _ask(a.redis(c), "CONFIG", "SET", "maxmemory", 1),
          lambda a, c: _ask(a.redis(c), "CONFIG", "SET", "maxmemory", 0)),
    Fault("scripts flushed", "store", "nothing", _NOW, _REDIS,
          lambda a, c: _ask(a.redis(c), "SCRIPT", "FLUSH")),
    Fault("loading", "store", "away", _BRIEFLY, _REDIS, _load,
          lambda a, c: _ask(a.redis(c), "CONFIG", "SET", "key-load-delay", 0)),
    Fault("read-only", "store", "away", _AWHILE, _ALONE,  # a replica of nobody, with its data
          lambda a, c: _ask(a.redis(c), "REPLICAOF", "127.0.0.1", 1),
          lambda a, c: _ask(a.redis(c), "REPLICAOF", "NO", "ONE")),
    Fault("clients killed", "store", "nothing", _NOW, _REDIS, _kill_clients),
    Fault("disk full", "store", "away", _AWHILE, ("redis", "cluster", "hybrid"), _fill_disk, _empty_disk),
    Fault("clock ahead", "store", "stepped", _NOW, (), lambda a, _: a.step_clock(LEASE + 1)),
    Fault("clock back", "store", "nothing", _NOW, (), lambda a, _: a.step_clock(-2)),
    Fault("failover", "store", "lost", (2, 3), ("sentinel",),
          lambda a, _: a.servers.depose(), lambda a, _: a.servers.deposed.start()),
    Fault("slot migrated", "store", "nothing", _NOW, ("cluster",), _migrate_slot),
    Fault("sessions killed", "store", "nothing", _NOW, _SQL, _kill_sessions),

    Fault("broker killed", "broker", "broker", (0, 2), (),
          lambda a, _: a.servers.broker.kill(), lambda a, _: a.servers.broker.start()),
    Fault("broker frozen", "broker", "broker", (2, 6), (),
          lambda a, _: a.servers.broker.signal(signal.SIGSTOP),
          lambda a, _: a.servers.broker.signal(signal.SIGCONT)),
    Fault("broker unreachable", "broker", "broker", (0.5, 3), (),
          lambda a, _: a.servers.broker.proxy.refuse(), _HEAL["broker"]),
    Fault("broker's answers lost", "broker", "broker", _BRIEFLY, (),
          lambda a, _: a.servers.broker.proxy.swallow_replies(b"", times=4), _HEAL["broker"]),
)
# fmt: on
