"""The connections that a store opens for itself, beside those of the threads.

A verb commits at once, and must not commit what the caller has in a transaction. So while the thread's own connection
is in one, the verb takes a connection from here::

    the thread's connection   BEGIN ─ the caller's writes ──────────────────────────── COMMIT or ROLLBACK
    a spare connection                                     claim, committed at once

``OPTIONS["pool"]`` of the project does not apply. A task in a transaction holds one connection of the pool while
its verb would wait for a second: with as many tasks as connections, all wait for each other. And a pool that a worker's
main process has opened is copied, sockets included, into every child that it forks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.db import connections

from celery_idempotent.django.testcases import under_test

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: How many of them a process uses at once. Who finds none free waits, and after so many seconds opens one more.
MAX_OPEN = 8
_WAIT_SECONDS = 2.0
#: How many idle ones stay open, and for how long.
MAX_IDLE = 2
_MAX_AGE = 60.0

#: Connections that a fork copied: their sockets are the parent's. Using them would mix the answers of both processes,
#: and closing them (as the garbage collector does) would end the parent's session. So they are referenced for ever.
_inherited: list[object] = []
_known: list[weakref.ref[SpareConnections]] = []


class SpareConnections:
    """The spare connections of this process to the database of one alias."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._forget()
        _known.append(weakref.ref(self))

    def _forget(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._idle: list[tuple[float, BaseDatabaseWrapper]] = []
        # Not a Semaphore: that is Python, and an exception out of a signal handler could leave its lock taken.
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_OPEN):
            self._tickets.put(None)
        self._pid = os.getpid()
        # The heartbeat's thread may write counters after the store was closed: then a connection is idle again, and
        # is closed with the store that nothing refers to any more.
        weakref.finalize(self, _close_idle, self._idle, self._pid).atexit = False

    @contextlib.contextmanager
    def take(
        self, *, fresh: bool, harmless: tuple[type[BaseException], ...]
    ) -> Iterator[BaseDatabaseWrapper]:
        """Lend a connection, a new one if it has to be ``fresh``; any exception but a harmless one closes it."""
        self._forget_after_fork()
        with self._ticket():
            connection = self._newest_idle() if not fresh else None
            if fresh:
                self.close()
            if connection is None:
                connection = self._new()
            clean = False
            try:
                yield connection
                clean = True
            except harmless:
                clean = True
                raise
            finally:
                # Not in tests: PostgreSQL refuses to drop a test's database while a connection to it is open.
                if clean and len(self._idle) < MAX_IDLE and not under_test():
                    self._idle.append((time.monotonic(), connection))
                else:
                    connection.close()

    def close(self) -> None:
        """Close the idle ones."""
        self._forget_after_fork()
        _close_idle(self._idle, self._pid)

    @contextlib.contextmanager
    def _ticket(self) -> Iterator[None]:
        # An exception out of a signal handler may lose a ticket for good. After the wait the verb goes on without one.
        try:
            self._tickets.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            yield
            return
        try:
            yield
        finally:
            self._tickets.put(None)

    def _newest_idle(self) -> BaseDatabaseWrapper | None:
        while True:
            try:
                used, connection = self._idle.pop()
            except IndexError:
                return None
            settings = connection.settings_dict
            age = time.monotonic() - used
            # During tests an alias stands for another database.
            if age < max(_MAX_AGE, settings["CONN_MAX_AGE"] or 0) and (
                settings["NAME"] == connections[self._alias].settings_dict["NAME"]
            ):
                return connection
            connection.close()

    def _new(self) -> BaseDatabaseWrapper:
        connection = connections.create_connection(self._alias)
        settings = connection.settings_dict
        options = {name: value for name, value in settings["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**settings, "OPTIONS": options}
        connection.inc_thread_sharing()
        return connection

    def _forget_after_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._forget()


def _close_idle(idle: list[tuple[float, BaseDatabaseWrapper]], pid: int) -> None:
    """Close connections that this process opened."""
    if pid != os.getpid():
        return
    with contextlib.suppress(IndexError):
        while True:
            _, connection = idle.pop()
            # Not by Django's own close(): it refuses wherever an event loop runs, and garbage is collected there, too.
            raw, in_memory = connection.connection, getattr(connection, "is_in_memory_db", bool)
            if raw is not None and not in_memory():  # whose tables its last connection takes along
                connection.connection = None
                with contextlib.suppress(Exception):
                    raw.close()


def is_inherited(raw: object) -> bool:
    """Was this connection opened by the parent process?"""
    return any(raw is known for known in _inherited)


def _close_all() -> None:
    """Close the idle connections before a fork, so that the child gets no copy of them."""
    for known in tuple(_known):
        spare = known()
        if spare is not None:
            spare.close()
        else:
            _known.remove(known)


def _note_inherited() -> None:
    _inherited.extend(
        known.connection
        for known in connections.all(initialized_only=True)
        if known.connection is not None
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_close_all, after_in_child=_note_inherited)
