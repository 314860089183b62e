"""A server's clock that tests can move: real scripts, with an offset added to Redis' TIME."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from celery_idempotent.stores.redis.servers import SOURCES, Command, Link
from celery_idempotent.stores.redis.store import RedisStore

TIME = b"local time = redis.call('TIME')"


class LinkProxy:
    """A link that does something to some of what passes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class CountingLink(LinkProxy):
    """Counts the exchanges, each a round trip."""

    trips = 0

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Any]:
        self.trips += 1
        return self._link.exchange(commands, node)


class ShiftedLink(LinkProxy):
    """Adds the offset to every TIME that passes, in scripts and in answers."""

    offset_us = 0

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Any]:
        answers = self._link.exchange([self._shifted(command) for command in commands], node)
        for n, command in enumerate(commands):
            if command[0] == b"TIME":
                seconds, micros = divmod(
                    int(answers[n][0]) * 1_000_000 + int(answers[n][1]) + self.offset_us, 1_000_000
                )
                answers[n] = [b"%d" % seconds, b"%d" % micros]
        return answers

    def _shifted(self, command: Command) -> Command:
        kind, *rest = command
        if not self.offset_us or kind not in (b"EVALSHA", b"EVAL"):
            return command
        source = SOURCES[rest[0]] if kind == b"EVALSHA" else rest[0]
        moved = source.replace(TIME, TIME + b" time[2] = time[2] + %d" % self.offset_us)
        assert moved != source or b"'TIME'" not in source
        return (b"EVAL", moved, *rest[1:])


class Shift:
    """Lets time pass for one store: the offset grows, and what Redis would have expired expires."""

    def __init__(self, store: RedisStore, *nodes: redis.Redis) -> None:
        self._nodes = nodes
        self._match = f"{store.prefix}:*"
        self._store, self._link = store, ShiftedLink(store._link)
        store._link = self._link  # type: ignore[assignment]

    def __call__(self, ms: float) -> None:
        ms = round(ms)
        self._link.offset_us += ms * 1000
        self._store._clock = RedisStore._clock
        for node in self._nodes:
            names = list(node.scan_iter(match=self._match, count=10_000))
            with node.pipeline(transaction=False) as commands:
                for name in names:
                    commands.pttl(name)
                for name, left in zip(names, commands.execute(), strict=True):
                    if 0 <= left <= ms:
                        commands.delete(name)
                    elif left > ms:
                        commands.pexpire(name, left - ms)
                commands.execute()


class StandingStore(RedisStore):
    """A store that asks its server for each time, for one whose clock stands still."""

    _clock: Any = property(lambda _: RedisStore._clock, lambda *_: None)


class FixedLink(LinkProxy):
    """Stops a server's clock: scripts read the time from a list in Redis, which the test moves."""

    def __init__(self, link: Link, client: redis.Redis, name: str) -> None:
        super().__init__(link)
        self.now_us = 0
        self._client = client
        self._name = name
        self._read = b"local time = redis.call('LRANGE', '%b', 0, 1)" % name.encode()

    def set(self, now_us: int) -> None:
        self.now_us = now_us
        self._client.delete(self._name)
        self._client.rpush(self._name, *self._time())

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Any]:
        answers = self._link.exchange([self._fixed(command) for command in commands], node)
        for n, command in enumerate(commands):
            if command[0] == b"TIME":
                answers[n] = self._time()
        return answers

    def _time(self) -> list[bytes]:
        return [b"%d" % part for part in divmod(self.now_us, 1_000_000)]

    def _fixed(self, command: Command) -> Command:
        if command[0] != b"EVALSHA":
            return command
        source = SOURCES[command[1]]
        fixed = source.replace(TIME, self._read)
        assert fixed != source or b"'TIME'" not in source
        return (b"EVAL", fixed, *command[2:])
