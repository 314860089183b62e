"""The result of a task, stored by the very script that settles its record, where both are in one Redis.

Celery's tracer stores it after the run, in two round trips of its own. Here these are left out::

    apart      run ─ settle ─ GET (a SUCCESS already?) ─ MULTI, SETEX, PUBLISH, EXEC ─ hooks, signals ─ ack
    together   run ─ settle, GET, SETEX, PUBLISH in one script ────────────────────── hooks, signals ─ ack
    duplicate  replay ─ GET, SETEX, PUBLISH in one script ─────────────────────────── hooks, signals ─ ack

The result is the backend's own: its fields, its serializer and compression, its key, channel and expiry. Whatever is
unusual has it stored apart, as ever: a backend that is no plain ``RedisBackend``, or has a method replaced; another
server, database or login than the store's; a request that has something to send afterwards; the exception of a failure.
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.app import trace

from celery_idempotent.celery import delivery
from celery_idempotent.celery.entering import entry_of
from celery_idempotent.records import ResultWrite

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyBackend, AnyRequest
    from celery_idempotent.stores.base import Store

#: On a request: of which task id the result is stored, until the tracer would store it.
_WRITTEN = "idempotency_result"

#: The methods of a backend that are bypassed. Where one of them is overridden, Celery stores the result.
_BYPASSED = frozenset(
    {
        "mark_as_done",
        "store_result",
        "_store_result",
        "_get_task_meta_for",
        "_set_with_state",
        "_set",
        "ensure",
        "_ensure_retryable",
        "decode_result",
        "get",
        "set",
    }
)
_CELERYS = {"celery.backends.base", "celery.backends.redis"}

#: A larger result takes long to send: it is left to Celery, which waits longer for Redis than a store does.
_LARGEST = 1024 * 1024


class _Plan(NamedTuple):
    """For how many seconds a backend keeps results; ``None``: this store cannot write them.

    It was made under these ``circumstances``, and is made anew under others.
    """

    circumstances: tuple[object, ...]
    expires_s: int | None


_plans: weakref.WeakKeyDictionary[AnyBackend, _Plan] = weakref.WeakKeyDictionary()


def ignores_result(task: IdempotentTask, request: Context) -> bool:
    """Does Celery's tracer leave the result of this request alone?"""
    actual = getattr(trace, "get_actual_ignore_result", None)  # Celery >= 5.7
    return bool(actual(task, request) if actual else task.ignore_result)


class RequestResult:
    """The value that the run of a request returned, as Celery's tracer would store it."""

    __slots__ = ("_request", "_task", "_task_id", "_value")

    def __init__(self, task: IdempotentTask, request: Any, task_id: str, value: object) -> None:
        self._task, self._request, self._task_id, self._value = task, request, task_id, value

    def write_for(self, store: Store) -> ResultWrite | None:
        """Return what this store is to write; ``None`` if the result is left to Celery."""
        try:
            if self._is_plain():
                return self._build_write(store)
        except Exception:  # noqa: BLE001, S110  Celery says what is wrong with it, when it stores it
            pass
        return None

    def write_replayed(self, store: Store) -> None:
        """Store the value of a duplicate; whatever keeps it from being stored, the tracer stores it.

        A soft time limit that strikes here is no failure either: the task has its value.
        """
        try:
            result = self.write_for(store)
            if result is not None and store.write_result(result):
                self.note_written()
        except Exception:  # noqa: BLE001, S110
            pass

    def note_written(self) -> None:
        """Let the tracer leave it out."""
        vars(self._request)[_WRITTEN] = self._task_id

    def _is_plain(self) -> bool:
        """Will Celery store this value, and do nothing else for it?"""
        task, request = self._task, self._request
        if request.is_eager or request.id != self._task_id:
            return False
        # Not of a tracer: somebody pushed a request and called the task. Or a run of a pool that has another on top.
        if not request.delivery_info or task.request_stack.top is not request:
            return False
        # The body added them: a message that has callbacks never comes here (running.py).
        return not (
            request.ignore_result
            or ignores_result(task, request)
            or delivery.brings_callbacks(request)
        )

    def _build_write(self, store: Store) -> ResultWrite | None:
        backend: AnyBackend = self._task.backend
        plan = _plans.get(backend)
        circumstances = _circumstances(backend, store)
        if plan is None or plan.circumstances != circumstances:
            plan = _plans[backend] = _Plan(circumstances, _plan_of(backend, store))
        if plan.expires_s is None:
            return None
        payload = backend.encode(_meta(backend, self._request, self._value))
        if isinstance(payload, str):
            payload = payload.encode()
        if not isinstance(payload, bytes) or len(payload) > _LARGEST:
            return None
        key = backend.get_key_for_task(self._task_id)
        return ResultWrite(key=key, payload=payload, expires_s=plan.expires_s)


class _WrittenBackend:
    """Stands for a result backend in the one call by which the tracer would store what is stored."""

    def __init__(self, backend: AnyBackend, task_id: str) -> None:
        self._backend, self._task_id = backend, task_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def mark_as_done(
        self,
        task_id: str,
        result: object,
        request: object = None,
        store_result: bool = True,
        state: str = states.SUCCESS,
    ) -> object:
        stores = store_result and (task_id, state) != (self._task_id, states.SUCCESS)
        return self._backend.mark_as_done(task_id, result, request, stores, state)


def backend_for_tracer(backend: AnyBackend, requests: AnyRequest) -> AnyBackend:
    """Return the backend of a task; once, after a run whose result is stored, one that does not store it.

    ``requests`` is the task's stack of them, ``None`` before it is bound.
    """
    request = None if requests is None else requests.top
    if request is None or _WRITTEN not in vars(request) or entry_of(request) is not None:
        return backend
    return _WrittenBackend(backend, vars(request).pop(_WRITTEN))


# -- what a backend writes ---------------------------------------------------------------------------------------------


def _meta(backend: AnyBackend, request: AnyRequest, value: object) -> dict[str, object]:
    result = backend.encode_result(value, states.SUCCESS)
    meta: dict[str, object] = backend._get_result_meta(  # noqa: SLF001  so does its own _store_result
        result=result, state=states.SUCCESS, traceback=None, request=request
    )
    meta["task_id"] = request.id
    return meta


def _circumstances(backend: AnyBackend, store: Store) -> tuple[object, ...]:
    """Return what a plan depends on and may change while the process runs."""
    unchanged = _BYPASSED.isdisjoint(vars(backend))
    return store, backend.client, backend.expires, unchanged


def _plan_of(backend: AnyBackend, store: Store) -> int | None:
    """Ask Celery's own code what this backend writes: it is called with a client that only notes what it should do."""
    if _is_plain_redis(backend) and store.stores_results_of(backend.client.connection_pool):
        return _probe_expiry(backend)
    return None


def _is_plain_redis(backend: AnyBackend) -> bool:
    """Is this Celery's own backend, in which nothing is replaced, neither by a subclass nor on the instance?

    A method that someone has patched does something that would be left out, if the result were written past it.
    """
    kind = type(backend)
    if (kind.__module__, kind.__name__) != ("celery.backends.redis", "RedisBackend"):
        return False
    for name in _BYPASSED:
        method = inspect.getattr_static(kind, name)
        if name in vars(backend) or not isinstance(method, FunctionType):
            return False
        if method.__globals__["__name__"] not in _CELERYS:
            return False
    import redis

    client = backend.client
    return type(client) is redis.Redis and type(client.connection_pool) is redis.ConnectionPool


class _Notes(list[tuple[object, ...]]):
    """A client of Redis, and its pipeline, that only notes what they are asked for."""

    def __getattr__(self, name: str) -> object:
        return partial(self._note, name)

    def _note(self, name: str, *args: object) -> None:
        self.append((name, *args))

    def pipeline(self) -> _Notes:
        return self

    def __enter__(self) -> _Notes:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _probe_expiry(backend: AnyBackend) -> int | None:
    """Return for how many seconds a backend keeps a result (0: for ever); ``None``: it writes otherwise than expected.

    Its own ``store_result`` is called, with a client that only notes the commands.
    """
    from celery.app.task import Context

    request = Context(id="idempotency", task="idempotency", children=[])
    notes, encoded = _Notes(), []

    def encode(meta: dict[str, object]) -> str:
        encoded.append(meta)
        return "encoded"

    noting = object.__new__(type(backend))
    noting.__dict__ = {**vars(backend), "client": notes, "encode": encode}
    noting.store_result(request.id, None, states.SUCCESS, request=request)
    expected = _meta(backend, request, None)
    for meta in (expected, *encoded):
        meta.pop("date_done", None)
    key = backend.get_key_for_task(request.id)
    expires_s = 0
    write: tuple[object, ...] = ("set", key, "encoded")
    match notes:
        case [_, ("setex", _, int(seconds), _), *_]:
            expires_s, write = seconds, ("setex", key, seconds, "encoded")
    wanted = [("get", key), write, ("publish", key, "encoded"), ("execute",)]
    return expires_s if notes == wanted and encoded == [expected] else None
