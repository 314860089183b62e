"""Keeping a fork and SQLite apart: a child that is forked while a thread is inside SQLite may never get past its locks.

SQLite's own locks are the process's, and a fork copies them as they are, taken by a thread that the child does not
have. A worker's main process forks whenever it replaces a child, and the thread that interrupts that child's claim
asks the store at the same time. So a fork waits until no verb is inside SQLite, and a verb until the fork is done;
neither for long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["unforked"]

#: A fork, or a verb, waits no longer than that, in seconds.
_MAX_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.001

#: The threads inside. All that is done to it is one instruction: an exception may strike anywhere.
_inside: dict[int, None] = {}
#: When the fork that is under way began, by the monotonic clock.
_forking: list[float] = []


@contextmanager
def unforked() -> Iterator[None]:
    """Let nobody fork this process meanwhile; blocks may be nested."""
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
