"""Hybrid stores for tests: truths that count what they are asked, links that count, fail, lag and go back in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions

from celery_idempotent.stores.redis.servers import Command, Link

HISTORY = b"local info = redis.call('INFO', 'replication')"


def public(store: Any) -> list[str]:
    """Return the methods that whoever wraps a store has to have: who asks for them looks at attributes that exist."""
    return [
        name for name in dir(store) if not name.startswith("_") and callable(getattr(store, name))
    ]


class Counted:
    """A truth whose verbs are counted."""

    def __init__(self, truth: Any) -> None:
        self.asked: list[str] = []
        self._truth = truth
        for verb in public(truth):
            setattr(self, verb, self._counted(verb))

    def __getattr__(self, flag: str) -> Any:
        return getattr(self._truth, flag)

    def _counted(self, verb: str) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            self.asked.append(verb)
            # Looked up now: a test may have put another in its place.
            return getattr(self._truth, verb)(*args, **kwargs)

        return ask


class CountingLink:
    """Counts the exchanges, each a round trip."""

    def __init__(self, link: Link) -> None:
        self.where, self.spans = link.where, link.spans
        self.trips = 0
        self._link = link

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        self.trips += 1
        return self._link.exchange(commands)

    def nodes(self) -> Sequence[Any]:
        return self._link.nodes()

    def close(self) -> None:
        self._link.close()


class BadLink:
    """A server that can be away, lose answers, or execute what it was sent only much later."""

    def __init__(self, link: Link) -> None:
        self.where, self.spans = link.where, link.spans
        self.mode = "well"
        self.late: list[Sequence[Command]] = []
        self._link = link

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        if self.mode == "away":
            raise exceptions.ConnectionError("Connection refused.")
        if self.mode == "frozen":
            self.late.append(commands)
            raise exceptions.TimeoutError("Timeout reading from socket")
        answers = self._link.exchange(commands)
        if self.mode == "deaf":
            raise exceptions.TimeoutError("Timeout reading from socket")
        return answers

    def thaw(self) -> None:
        self.mode = "well"
        late, self.late = self.late, []
        for commands in late:
            self._link.exchange([command.with_source() for command in commands])

    def nodes(self) -> Sequence[Any]:
        return self._link.nodes()

    def close(self) -> None:
        self._link.close()


class DatedLink:
    """Makes the scripts believe in another history than the server's: as if a replica had taken over."""

    def __init__(self, link: Link) -> None:
        self.where, self.spans = link.where, link.spans
        self.history = 1
        self._link = link

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        return self._link.exchange([self._dated(command) for command in commands])

    def nodes(self) -> Sequence[Any]:
        return self._link.nodes()

    def close(self) -> None:
        self._link.close()

    def _dated(self, command: Command) -> Command:
        source = command.source if command.words[0] == b"EVALSHA" else command.words[1]
        assert source is not None
        dated = source.replace(
            HISTORY, b"local info = 'role:master\\r\\nmaster_replid:%040x'" % (self.history << 96)
        )
        assert (dated != source) is (b"INFO" in source)
        return command._replace(words=(b"EVAL", dated, *command.words[2:]), source=None)
