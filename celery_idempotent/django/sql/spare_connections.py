"""The connections that a store opens beside the threads': a few are kept, each commits by itself.

They are plain ones, whatever ``DATABASES`` says of those of the project. Not from Django's pool (``OPTIONS["pool"]``):
that is sized for the tasks, one of which waits for a verb while it holds a connection of it; and a pool that a
worker's main process opens is inherited by every child that it forks later. And always with autocommit: whoever sets
``AUTOCOMMIT = False`` commits his own work, and nobody would commit that of a store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.db import Error, connections

from celery_idempotent.django.testcases import under_test

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["MAX_IDLE", "MAX_OPEN", "SpareConnections", "is_inherited"]

#: How many connections of its own a process uses at once; more only after a wait of as many seconds.
MAX_OPEN = 8
_WAIT_SECONDS = 2.0
#: How many of them it keeps, and for how long.
MAX_IDLE = 2
_MAX_AGE = 60.0

#: What a fork brought along: sockets of the parent, which the child must neither use nor close.
_inherited: list[object] = []
_known: list[weakref.ref[SpareConnections]] = []


class SpareConnections:
    """Those to the database of one alias, of one process."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._forget()
        _known.append(weakref.ref(self))

    def _forget(self) -> None:
        self._idle: list[tuple[float, BaseDatabaseWrapper]] = []
        # Its methods are C: an exception out of a signal handler cannot leave its lock taken.
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_OPEN):
            self._tickets.put(None)
        self._pid = os.getpid()

    @contextlib.contextmanager
    def take(
        self, *, fresh: bool, harmless: tuple[type[BaseException], ...]
    ) -> Iterator[BaseDatabaseWrapper]:
        """Lend a connection, a new one if it has to be ``fresh``; any exception but a harmless one closes it."""
        self._forget_after_fork()
        with self._ticket():
            connection = self._kept() if not fresh else None
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
                # Tests drop their database in the end, which nobody may be connected to then.
                if clean and len(self._idle) < MAX_IDLE and not under_test():
                    self._idle.append((time.monotonic(), connection))
                else:
                    connection.close()

    def close(self) -> None:
        """Close those that nobody uses."""
        self._forget_after_fork()
        with contextlib.suppress(IndexError):
            while True:
                _, connection = self._idle.pop()
                with contextlib.suppress(Error):
                    connection.close()

    @contextlib.contextmanager
    def _ticket(self) -> Iterator[None]:
        # A ticket may be lost to an exception out of a signal handler: late is better than never.
        try:
            self._tickets.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            yield
            return
        try:
            yield
        finally:
            self._tickets.put(None)

    def _kept(self) -> BaseDatabaseWrapper | None:
        while True:
            try:
                used, connection = self._idle.pop()
            except IndexError:
                return None
            settings = connection.settings_dict
            age = time.monotonic() - used
            # Tests give an alias another database.
            if age < max(_MAX_AGE, settings["CONN_MAX_AGE"] or 0) and (
                settings["NAME"] == connections[self._alias].settings_dict["NAME"]
            ):
                return connection
            connection.close()

    def _new(self) -> BaseDatabaseWrapper:
        connection = connections.create_connection(self._alias)
        settings = connection.settings_dict
        options = {name: value for name, value in settings["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**settings, "AUTOCOMMIT": True, "OPTIONS": options}
        connection.inc_thread_sharing()
        return connection

    def _forget_after_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._forget()


def is_inherited(raw: object) -> bool:
    """Is this connection the parent process's?"""
    return any(raw is known for known in _inherited)


def _close_all() -> None:
    """Leave no connection to a child that is about to be forked; one in use is the parent's alone."""
    for known in tuple(_known):
        kept = known()
        if kept is not None:
            kept.close()
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
