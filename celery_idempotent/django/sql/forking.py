"""Keeps forks and SQLite apart: a child that is forked while a thread is inside SQLite may wait for ever.

SQLite has mutexes in the process's memory, and a fork copies them locked, without the thread that would unlock them::

    thread A   lock mutex ─ write ─ unlock
    thread B              fork
    child                 (mutex is locked, there is no thread A) ─ first query ─ waits for ever

A worker's main process forks to replace a lost child, and interrupts that child's claim, in another thread, at the
same time. So a fork waits until no verb is inside SQLite, and a verb waits until the fork is done; both for
milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Then the fork, or the verb, goes ahead regardless: waiting for ever would be as bad as what it prevents.
_MAX_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.001

#: The threads inside SQLite. A dict, since adding and removing are single instructions: a signal handler may raise an
#: exception between any two, and must not leave a lock taken.
_inside: dict[int, None] = {}
#: When the fork that is under way began, by the monotonic clock.
_forking: list[float] = []


@contextmanager
def unforked() -> Iterator[None]:
    """Let this process not fork during the block; blocks may be nested."""
    me = threading.get_ident()
    if me in _inside:
        yield
        return
    try:
        _enter(me)
        yield
    finally:
        _inside.pop(me, None)


def _enter(me: int) -> None:
    while True:
        while _forking and time.monotonic() - _forking[-1] < _MAX_WAIT_SECONDS:
            time.sleep(_POLL_SECONDS)
        _inside[me] = None
        # A fork may have begun between the two.
        if not _forking or time.monotonic() - _forking[-1] >= _MAX_WAIT_SECONDS:
            return
        _inside.pop(me, None)


def _before() -> None:
    me, began = threading.get_ident(), time.monotonic()
    _forking.append(began)
    while any(thread != me for thread in tuple(_inside)):
        if time.monotonic() - began > _MAX_WAIT_SECONDS:
            return
        time.sleep(_POLL_SECONDS)


def _after_in_parent() -> None:
    if _forking:
        _forking.pop()


def _after_in_child() -> None:
    me = threading.get_ident()
    for thread in tuple(_inside):
        if thread != me:
            _inside.pop(thread, None)
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
