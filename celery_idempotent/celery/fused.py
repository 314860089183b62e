"""The result of a task, stored in the same step as its record, where both are in one Redis.

::

    apart      run ─ settle ─ GET (a SUCCESS already?) ─ MULTI, SETEX, PUBLISH, EXEC ─ hooks, signals ─ ack
    together   run ─ settle, GET, SETEX, PUBLISH in one script ────────────────────── hooks, signals ─ ack
    duplicate  replay ─ SETEX, PUBLISH in one transaction ─────────────────────────── hooks, signals ─ ack

Only values, as JSON, and only in Celery's own ``RedisBackend``: Celery stores everything else. The bytes are those that
Celery writes, but ``date_done`` is always in UTC.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

from celery.app import task as app_task
from celery.app import trace

from celery_idempotent.celery.callbacks import callbacks_of
from celery_idempotent.records import ResultWrite, Stored
from celery_idempotent.serializers import JSON, encode_json, is_kombus_json

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.stores.base import Store

#: Does Celery's tracer leave the result of a request alone? Some releases ask the task only.
_is_ignored: Any = {**vars(trace), **vars(app_task)}.get(
    "get_actual_ignore_result", lambda task, _: task.ignore_result
)

#: For a larger result Celery waits longer than a store does.
_LARGEST = 1024 * 1024

#: On a backend: a store, and the prefix of the results that it may write there; ``None``: it may not.
_PREFIX = "idempotency_prefix"


def write_of(task: AnyTask, request: Any, store: Store, value: Stored | None) -> ResultWrite | None:
    """Return the write of this request's result, whose ``value`` is the record's; ``None``: it is left to Celery."""
    if value is None or value.content_type != JSON or len(value.body) > _LARGEST:
        return None
    # Without delivery_info it is not of a tracer: somebody pushed a request and called the task.
    if request.is_eager or request.ignore_result or not request.delivery_info:
        return None
    if any(callbacks_of(request)):
        return None
    backend: Any = task.backend
    known, prefix = vars(backend).get(_PREFIX, (None, None))
    if known is not store:
        fits = _is_plain(backend) and store.stores_results_of(backend.client.connection_pool)
        prefix = backend.get_key_for_task("id")[:-2] if fits else None
        vars(backend)[_PREFIX] = store, prefix
    if prefix is None or _is_ignored(task, request):
        return None
    key, expires_s = prefix + request.id.encode(), int(backend.expires or 0)
    return ResultWrite(key, _payload(request, value), expires_s)


def _payload(request: Any, value: Stored) -> bytes:
    """Return what Celery would encode: the fields of ``_get_result_meta``, then the task id."""
    children = request.children
    seconds, ns = divmod(time.time_ns(), 1_000_000_000)
    after = f'"date_done": "{_second(seconds)}.{ns // 1000:06}+00:00"'
    if request.group:
        after += f', "group_id": {encode_json(request.group)}'
    if request.parent_id:
        after += f', "parent_id": {encode_json(request.parent_id)}'
    return b'{"status": "SUCCESS", "result": %b, "traceback": null, "children": %b, %b}' % (
        value.body,
        encode_json([each.as_tuple() for each in children]).encode() if children else b"[]",
        f'{after}, "task_id": {encode_basestring_ascii(request.id)}'.encode(),
    )


@lru_cache(maxsize=2)  # a quarter of the time of isoformat(), which takes 6 µs
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _is_plain(backend: Any) -> bool:
    """Is this Celery's own backend, on the client that it makes, which writes plain JSON?"""
    kind = type(backend)
    return (
        (kind.__module__, kind.__name__) == ("celery.backends.redis", "RedisBackend")
        and type(backend.client).__module__ == "redis.client"
        and backend.serializer == "json"
        and is_kombus_json()
        and not getattr(backend, "compression", None)
        and not backend.app.conf.find_value_for_key("extended", "result")
    )
