"""One delivery of a task: from Celery's request to a call of the protocol, and from the protocol's answer to Celery.

::

    request ─ call_of ─▶ Call ─ Runner.execute ─▶ Ran ──────────── the value is returned: SUCCESS
                                                  Replay ───────── the stored value is returned, or the error raised
                                                  Conflict ─────── republished, dropped or failed (on_conflict)
                                                  StoreFailed ──┬─ republished: nothing is known to be done
                                                                └─ run without protection (on_store_error="open")
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from celery.app.autoretry import add_autoretry_behaviour
from celery.exceptions import Ignore, Reject, Retry
from celery.utils import uuid

from celery_idempotent.celery import delivery, exchanges, republish
from celery_idempotent.celery.definition import Definition
from celery_idempotent.celery.fused import write_of
from celery_idempotent.celery.replay import replay
from celery_idempotent.errors import InvalidKey
from celery_idempotent.identity import stamp
from celery_idempotent.identity.identified import Identified
from celery_idempotent.identity.stamp import as_mapping
from celery_idempotent.protocol.calls import Call, Conflict, Ran, Replay, StoreFailed, worker_name
from celery_idempotent.records import ResultWrite, Stored
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask

logger = logging.getLogger(__name__)

#: The hard time limit of the pool of an app's worker, in seconds; a task or message may have a limit of its own.
pool_time_limits: weakref.WeakKeyDictionary[Celery, float | None] = weakref.WeakKeyDictionary()

#: A limit begins before the task is called, by the time that Celery's signals and ``before_start`` take. A run that
#: is ended this close to its limit, in seconds or as a share of it, has met the limit.
_MARGIN_S, _MARGIN = 0.5, 0.1

#: Words of a stamp that a publisher set in headers of its own.
_OF_THIS_MESSAGE = frozenset({stamp.RAW_KEY, stamp.RAW_SCOPE, stamp.KEEP_FAILURE})


def run_once(  # noqa: RET503  a conflict always raises
    task: IdempotentTask,
    definition: Definition,
    request: Context,
    call: Call,
    body: Callable[[], object],
) -> object:
    """Do what the protocol says: run the body, answer from the record, or have the message come back.

    Raises:
        StaysError: if the protocol is to be asked again at once.
    """
    if call.identity.by_task_id and exchanges.is_broadcast(request):
        # Each worker has the message under this task id, and each is to run it.
        return definition.runner.unguarded(call, body)
    match definition.runner.execute(call, body):
        case Ran(value):
            return value
        case Replay(record, age_ms):
            value = replay(task, definition, request, record, age_ms)
            if call.result is not None:
                _store_replayed(task, request, record.value)
            return value
        case Conflict(record, left_ms):
            republish.conflict(task, request, record, left_ms)
        case StoreFailed(error) as failed:
            if failed.barred or definition.policy.on_store_error != "open":
                republish.after_store_failure(task, request, failed)
            logger.warning(
                "idempotency: %s[%s] runs without protection: %s", task.name, request.id, error
            )
            return definition.runner.unguarded(call, body)


def call_of(
    task: IdempotentTask,
    definition: Definition,
    request: Context,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Call:
    """Return what a delivery asks of the protocol.

    Raises:
        InvalidKey: if its stamp is malformed, or its key cannot be used.
    """
    task_id = str(request.id or _id_of_direct_call(task, request))
    headers = as_mapping(request.headers)
    said = stamp.read_stamp(headers, task_id)
    policy = definition.policy
    identified = identify_delivery(
        definition,
        # A canvas may stamp the key on its tasks; then it is no header of ours that has it.
        {**as_mapping(request.stamps), **headers} if request.stamps else headers,
        args,
        kwargs,
        task_id=task_id,
        nesting=request.replaced_task_nesting or 0,
        said=None if request.stamps else said,
        eager=bool(request.is_eager),
    )
    identity = identified.identity
    if not _OF_THIS_MESSAGE.isdisjoint(said) or (definition.keyed and not said):
        # From here on they are this message's alone: the body may hand its headers to other calls. And should it be
        # published again, its key does not depend on what the body made of the arguments.
        request.headers = stamp.with_stamp(headers, task_id, identified)
    on_settled = result = None
    if policy.mode == "enforce" and delivery.brings_callbacks(request):
        mark = partial(delivery.mark, task.app, identity)
        on_settled = partial(delivery.note_due, task, task_id, mark)
    elif definition.fuses:
        result = _RequestResult(task, request)
    waits = policy.on_conflict == "wait"
    limit = (request.timelimit or (None,))[0] or task.time_limit or pool_time_limits.get(task.app)
    return Call(
        identity=identity,
        fingerprint=identified.fingerprint,
        task_id=task_id,
        worker=worker_name(os.getpid()),
        longest_wait_ms=republish.longest_wait_ms(task, request) if waits else None,
        ends_at=_ends_at(limit) if limit else float("inf"),
        on_settled=on_settled,
        result=result,
        message=_message(task, definition, request),
        on_late_error=partial(late_outcome, task),
        open_transactions=task.transactions_around if request.is_eager else None,
        control=(Ignore, Reject, Retry),
        keep_failure=stamp.KEEP_FAILURE in said,
    )


class _RequestResult:
    """The result of a request, which the store may write together with its record."""

    def __init__(self, task: IdempotentTask, request: Context) -> None:
        self._task, self._request = task, request

    def write_for(self, store: Store, value: Stored | None) -> ResultWrite | None:
        """Return what this store is to write; ``None`` if the result is left to Celery."""
        return write_of(self._task, self._request, store, value)

    def note_written(self) -> None:
        """Let the tracer leave it out."""
        self._request.ignore_result = True


def _store_replayed(task: IdempotentTask, request: Context, value: Stored | None) -> None:
    """Store the value of a duplicate in one trip, where that can be; else the tracer stores it, in two.

    A soft time limit that strikes here is no failure either: the task has its value.
    """
    try:
        store = get_store(task.app)
        write = write_of(task, request, store, value)
        if write is not None and store.write_result(write):
            request.ignore_result = True
    except Exception:  # noqa: BLE001, S110
        pass


def _ends_at(limit_s: float) -> float:
    """Return when a run that begins now meets its hard time limit, less the margin (``time.monotonic``)."""
    return time.monotonic() + limit_s - max(_MARGIN_S, _MARGIN * limit_s)


def identify_delivery(
    definition: Definition,
    headers: Mapping[str, object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    task_id: str,
    nesting: int = 0,
    said: Mapping[str, object] | None = None,
    eager: bool = False,
) -> Identified:
    """Return what a message is about: its stamp, else what its publisher's headers or its arguments say.

    ``said`` is what the headers say, where they are read already. An ``eager`` call without a key gets a key of its
    own: Celery gives all steps of an eager chain one task id.

    Raises:
        InvalidKey: if the stamp is malformed, or the key cannot be used.
    """
    if said is None:
        said = stamp.read_stamp(headers, task_id)
    own_id = uuid() if eager else stamp.message_id(said, task_id)
    header = stamp.stamp_of(headers, task_id)
    if header is not None:
        try:
            stamped = Identified.from_header(header, definition.identifier.namespace)
        except InvalidKey as error:
            if definition.policy.mode != "observe":
                raise
            return definition.observed(error, task_id)
        if stamped is not None:
            return stamped
    return definition.identify(
        args,
        kwargs,
        task_id=own_id,
        nesting=nesting,
        key=said.get(stamp.RAW_KEY),
        scope=said.get(stamp.RAW_SCOPE),
    )


def _id_of_direct_call(task: IdempotentTask, request: Context) -> str:
    """Return an id for a call as a function, which has none: the same for as long as the call lasts."""
    if request is not task.request_stack.top:
        return uuid()  # of run() itself, whose calls share one request
    made: str = vars(request).setdefault("idempotency_call", uuid())
    return made


def late_outcome(task: IdempotentTask, error: Exception) -> Exception:
    """Return what is raised for an error as if the body had raised it: a retry, published by now, or the error.

    The error comes from the COMMIT of an atomic task, when ``run`` has returned, so that Celery's own wrapper of
    ``autoretry_for`` around ``run`` cannot see it. The same wrapper goes around a copy of the task here, whose ``run``
    raises the error: so every option counts, in whatever way this release of Celery reads it.
    """

    def run() -> NoReturn:
        raise error

    late = object.__new__(type(task))
    vars(late).update({**vars(task), "run": run})
    vars(late).pop("_orig_run", None)
    add_autoretry_behaviour(late)
    try:
        late.run()
    except Exception as found:  # noqa: BLE001  whatever it is
        return found
    raise AssertionError


def _message(task: IdempotentTask, definition: Definition, request: Context) -> bytes | None:
    """Return this message as a sweep would publish it again, if the policy wants that."""
    policy = definition.policy
    # Where a task is only observed, its second message would be a second run.
    if policy.on_stale != "requeue" or policy.mode == "observe" or request.is_eager:
        return None
    again = task.signature_from_request(
        request,
        retries=request.retries,
        # As a republished message: the operation has begun in time.
        expires=None,
        add_to_parent=False,
        **republish.as_published(request),
    )
    return definition.codec.dump_message(again)
