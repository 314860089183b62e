"""Connections to one Redis server, each put back only after a complete answer.

Why not ``redis.Redis``? Two thirds of its time per command goes to its pool and its retries. And an exception out of a
signal handler (``SoftTimeLimitExceeded``, ``SystemExit``) may strike between any two instructions::

    task     takes connection 1 ── sends claim ── SoftTimeLimitExceeded
    pool     takes connection 1 back, its answer unread
    other    takes connection 1 ── sends settle ── reads the answer to the claim

Here a connection that did not finish its exchange is closed, and never used again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from redis import exceptions

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.stores.redis.endpoint import Endpoint
from celery_idempotent.stores.redis.scripts import Command, Reply

#: Host and port.
Address: TypeAlias = tuple[str, int]

#: How many idle connections stay open after a burst of threads or greenlets.
_MAX_IDLE = 64

#: Errors that may be gone at the next try: a failover, a full memory. redis-py has classes for some of them, but not
#: all of its parsers raise these.
_PASSING_ERRORS = {
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.OutOfMemoryError: "OOM",
}
#: Their word: at the start of the message or, before Redis 7, in the middle of a script's error.
_PASSING = re.compile(
    r"(?:^|: -)(MOVED|ASK|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|READONLY|OOM"
    r"|LOADING|BUSY|MISCONF|NOREPLICAS|UNBLOCKED)\b"
)
_LOGIN_ERRORS = (exceptions.AuthenticationError, exceptions.AuthorizationError)


class Connection(Protocol):
    """What we use of redis-py's connections."""

    def send_packed_command(self, command: list[bytes]) -> None:
        """Connect if need be, and send."""
        ...

    def read_response(self) -> Reply:
        """Return the next reply, or raise its ``ResponseError``."""
        ...

    def disconnect(self) -> None:
        """Close the socket; the next command opens another."""
        ...


class Link(Protocol):
    """The way to a server, or to all servers of a cluster."""

    where: str
    #: May one script touch keys of several buckets?
    spans: bool

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the answer to each command: a ``ResponseError`` where the server refused it."""
        ...

    def nodes(self) -> list[int]:
        """Return one bucket of each node: commands about that bucket go to this node."""
        ...

    def close(self) -> None:
        """Close the idle connections."""
        ...


class Channel:
    """The idle connections to one server, last in, first out."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []
        self._pid = os.getpid()

    def exchange(self, commands: Sequence[Command], *, fresh: bool = False) -> list[Reply]:
        """Send the commands at once and read as many answers."""
        packed = b"".join([command.packed() for command in commands])
        connection = self._connect() if fresh else self._take()
        answers: list[Reply] = []
        try:
            connection.send_packed_command([packed])
            for _ in commands:
                try:
                    answer = connection.read_response()
                except exceptions.ResponseError as error:
                    answer = error
                answers.append(answer)
        except BaseException:
            connection.disconnect()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()
        return answers

    def close(self) -> None:
        """Close the idle connections."""
        self._forget_after_fork()
        # One by one, each popped by one thread only: others may be taking and closing as well.
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()

    def _take(self) -> Connection:
        self._forget_after_fork()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _forget_after_fork(self) -> None:
        # A child has copies of its parent's sockets. redis-py closes them without shutting down the connection, which
        # stays the parent's.
        if self._pid != os.getpid():
            self._idle = []
            self._pid = os.getpid()


class Server:
    """One server: by address, by unix socket, or the master that Sentinel names, which has no fixed ``endpoint``."""

    def __init__(
        self, connect: Callable[[], Connection], *, where: str, endpoint: Endpoint | None = None
    ) -> None:
        self.where = where
        self.endpoint = endpoint
        self.spans = True
        self._channel = Channel(connect)

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the answer to each command, from another connection if the first was dead."""
        try:
            answers = self._channel.exchange(commands)
        except exceptions.ConnectionError as error:
            if isinstance(error, _LOGIN_ERRORS):
                raise
            # The server had closed an idle connection, or there was a failover. Every verb may be sent twice: a claim
            # names its attempt, and all others a token.
            return self._again(commands)
        for answer in answers:
            if isinstance(answer, exceptions.RedisError) and passing(answer) == "READONLY":
                # A replica answered: it is no longer the master.
                return self._again(commands)
        return answers

    def nodes(self) -> list[int]:
        """Return any bucket: they are all here."""
        return [0]

    def close(self) -> None:
        """Close the idle connections."""
        self._channel.close()

    def _again(self, commands: Sequence[Command]) -> list[Reply]:
        self._channel.close()
        return self._channel.exchange(commands, fresh=True)


def exchange(link: Link, commands: Sequence[Command]) -> list[Reply]:
    """Return the answer to each command, giving the server the scripts that it does not know.

    Raises :exc:`StoreUnavailable` or :exc:`StoreMisconfigured` for whatever else goes wrong.
    """
    try:
        answers = link.exchange(commands)
        for answer in answers:
            if isinstance(answer, exceptions.RedisError):
                break
        else:
            return answers
        unknown = [n for n, a in enumerate(answers) if isinstance(a, exceptions.NoScriptError)]
        if unknown:
            repeated = link.exchange([commands[n].with_source() for n in unknown])
            for n, answer in zip(unknown, repeated, strict=True):
                answers[n] = answer
    except (exceptions.RedisError, OSError) as error:
        raise trouble(error, link.where) from error
    for answer in answers:
        if isinstance(answer, exceptions.RedisError):
            raise trouble(answer, link.where) from answer
    return answers


def passing(answer: object) -> str:
    """Return Redis' word for a refusal that another try may better, for any other answer ``""``."""
    if not isinstance(answer, exceptions.RedisError):
        return ""
    for kind, word in _PASSING_ERRORS.items():
        if isinstance(answer, kind):
            return word
    if not isinstance(answer, exceptions.ResponseError):
        return ""
    found = _PASSING.search(str(answer))
    return found[1] if found else ""


def trouble(error: Exception, where: str) -> StoreUnavailable | StoreMisconfigured:
    """Return the store's error for one of redis-py: StoreUnavailable if another try may help."""
    if isinstance(error, _LOGIN_ERRORS):
        return StoreMisconfigured(
            f"{where} refused us: {_sentence(error)}. Check user and password."
        )
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
        return StoreUnavailable(f"{where} did not answer: {error}")
    if isinstance(error, exceptions.NoPermissionError):
        return StoreMisconfigured(
            f"{where} refused us: {_sentence(error)}. Give the user the rights."
        )
    if passing(error):
        return StoreUnavailable(f"{where} cannot serve us at the moment: {error}")
    return StoreMisconfigured(f"{where} answered: {error}")


def _sentence(error: Exception) -> str:
    return str(error).rstrip(".")
