"""A server's clock that tests can move: real scripts, with an offset added to Redis' TIME."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import redis

from celery_idempotent.stores.channel import Link
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.scripts import Command, Script

TIME = b"local time = redis.call('TIME')"


class ShiftedLink:
    """Adds the offset to every TIME that passes, in scripts and in answers."""

    def __init__(self, link: Link) -> None:
        self.where = link.where
        self.offset_us = 0
        self._link = link

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        answers = self._link.exchange([self._shifted(command) for command in commands])
        for n, command in enumerate(commands):
            if command.words[0] == b"TIME":
                seconds, micros = divmod(
                    int(answers[n][0]) * 1_000_000 + int(answers[n][1]) + self.offset_us, 1_000_000
                )
                answers[n] = [b"%d" % seconds, b"%d" % micros]
        return answers

    def close(self) -> None:
        self._link.close()

    def _shifted(self, command: Command) -> Command:
        kind = command.words[0]
        if not self.offset_us or kind not in (b"EVALSHA", b"EVAL"):
            return command
        source = command.source if kind == b"EVALSHA" else command.words[1]
        assert source is not None
        moved = source.replace(TIME, TIME + b" time[2] = time[2] + %d" % self.offset_us)
        assert moved != source or b"'TIME'" not in source
        script = Script(moved, moved_digest(moved))
        if kind == b"EVAL":
            return Command(command.bucket, (b"EVAL", moved, *command.words[2:]))
        return Command(command.bucket, (kind, script.digest, *command.words[2:]), moved)


def moved_digest(source: bytes) -> bytes:
    return hashlib.sha1(source).hexdigest().encode()


class Shift:
    """Lets time pass for one store: the offset grows, and what Redis would have expired expires."""

    def __init__(self, store: RedisStore, *nodes: redis.Redis) -> None:
        self._nodes = nodes
        self._match = f"{store.prefix}:*"
        self._link = ShiftedLink(store._link)
        store._link = self._link

    def __call__(self, ms: float) -> None:
        ms = round(ms)
        self._link.offset_us += ms * 1000
        for node in self._nodes:
            for name in node.scan_iter(match=self._match, count=10_000):
                left = node.pttl(name)
                if 0 <= left <= ms:
                    node.delete(name)
                elif left > ms:
                    node.pexpire(name, left - ms)
