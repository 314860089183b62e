"""The claim is the outermost layer of a run: how a delivery finds its way through the ``__call__`` of every base.

::

    tracer ─▶ the claim ─▶ __call__ of other bases, in whatever order ─▶ run()
                 └─ gets the stored result, or is republished: nothing behind it is called

A transaction that a base opens around the run thus ends before the record says COMPLETED.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

from celery.exceptions import SoftTimeLimitExceeded

if TYPE_CHECKING:
    from celery.app.task import Context

Args = Sequence[object]
Kwargs = Mapping[str, object]

#: On a request: its delivery is under a claim already. Celery copies it with the request.
_MARK = "idempotency_entry"


class Entry:
    """A delivery that has entered the task and has not reached the end of ``run``.

    ``arrived``: all bases are passed, what follows are calls by the body. ``overridden``: see :class:`.Definition`.
    """

    __slots__ = ("_before", "_marks", "arrived", "overridden", "request")

    def __init__(self, request: Context, *, overridden: bool) -> None:
        self.arrived = False
        self.overridden = overridden
        self.request = request
        self._marks = vars(request)
        self._before: Entry | None = None

    def __enter__(self) -> Entry:
        self._before = _current_entry.get()
        _current_entry.set(self)
        self._marks[_MARK] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.pop(_MARK, None)
        _current_entry.set(self._before)


_current_entry: ContextVar[Entry | None] = ContextVar("idempotency_entry", default=None)


def entry_of(request: object) -> Entry | None:
    """Return the entry that a call belongs to, ``None`` if it is a new delivery.

    Some pools (celery-aio-pool) keep one request object for all deliveries of a task: a mark counts only in the context
    that made it.
    """
    entry: Entry | None = vars(request).get(_MARK)
    return entry if entry is not None and entry is _current_entry.get() else None


def put_claim_first(task: type, claiming: object, enter: Callable[..., object]) -> None:
    """Let ``enter(task, way, args, kwargs)`` be called before the ``__call__`` of any other base.

    ``claiming`` is the ``__call__`` that enters by itself: nothing to do if it comes first.
    """
    found = inspect.getattr_static(task, "__call__")
    if found is claiming or hasattr(found, _MARK):
        return

    def __call__(self: object, *args: object, **kwargs: object) -> object:  # noqa: N807
        return enter(self, found.__get__(self, type(self)), args, kwargs)

    setattr(__call__, _MARK, True)
    setattr(task, "__call__", __call__)  # noqa: B010  of a class, which mypy takes for a slip


def copied(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Return the arguments of a call as they are now, ``None`` if one of them cannot be copied."""
    try:
        return deepcopy((args, kwargs))
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001  an object of any kind
        return None


def repeatable(
    way: Callable[..., object], args: Args, kwargs: Kwargs, *, eager: bool
) -> Callable[[], object]:
    """Return a body that may be called again: with the arguments as they were, whatever an earlier call did to them.

    Those of a message stay what they are, because it may be published again. Those of an eager call are the caller's
    own, and the first call gets them. Only of these there may be no copy.
    """
    copy = copied(args, kwargs)
    if copy is None:
        return partial(way, *args, **kwargs)
    first, kept = ((args, kwargs), copy) if eager else (copy, (args, kwargs))
    given = [first]

    def body() -> object:
        args, kwargs = given.pop() if given else deepcopy(kept)
        return way(*args, **kwargs)

    return body
