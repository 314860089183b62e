"""One delivery of a task: from Celery's request to a run of the protocol, and from its answer to Celery.

::

    request ─ identify ─▶ Delivery ─ execute ─┬─▶ body ─ settle (and result) ─ the value is returned: SUCCESS
                                              ├─▶ replay: the stored value is returned, or the stored error raised
                                              └─▶ conflict, store failure: republished, dropped or failed

Who sends the callbacks of a message depends on which message settled the record::

    this very message, and they are sent        answer; Celery finds no callbacks
    this very message, and it died before       answer, send its callbacks, mark the record as delivered
    another message with the same key           answer, send its own callbacks: it is in a chain or chord of its own
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils import uuid

from celery_idempotent.celery import callbacks, fused, republish
from celery_idempotent.celery.definition import Definition
from celery_idempotent.errors import (
    InvalidKey,
    InvalidOption,
    ResultUnavailable,
    StoreMisconfigured,
)
from celery_idempotent.events import worker_name
from celery_idempotent.keys import stamp
from celery_idempotent.keys.stamp import Identified, as_mapping
from celery_idempotent.protocol import atomic, shield
from celery_idempotent.protocol.claim import current_run
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import EndState, Record, SettledWith, SettleRequest, State
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import DefinedTask
    from celery_idempotent.stores.base import Store

#: On a request: its delivery, which Celery copies with the request.
RUN = "idempotency_run"

Args = Sequence[object]
Kwargs = Mapping[str, object]

#: The hard time limit of the pool of an app's worker, in seconds; a task or message may have a limit of its own.
pool_time_limits: weakref.WeakKeyDictionary[Celery, float | None] = weakref.WeakKeyDictionary()

#: A limit begins before the task is called, by the time that Celery's signals and ``before_start`` take. A run that
#: is ended this close to its limit, in seconds or as a share of it, has met the limit.
_MARGIN_S, _MARGIN = 0.5, 0.1

#: Words of a stamp that a publisher set in headers of its own.
_OF_THIS_MESSAGE = frozenset({stamp.RAW_KEY, stamp.RAW_SCOPE, stamp.KEEP_FAILURE})

#: How records name this process, once it has had a delivery.
_worker: list[str] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.clear)


class Delivery(Run):
    """One delivery of a message, or one eager call.

    ``reached_run``: all bases are passed, what follows are calls by the body.
    """

    control = (Ignore, Reject, Retry)
    reached_run = False
    ended_as: State | None = None
    mark_token: int | None = None
    comes_back_until = 0.0
    chain: list[object] | None = None

    def __init__(
        self, task: DefinedTask, definition: Definition, request: Any, args: Args, kwargs: Kwargs
    ) -> None:
        self.task, self.definition, self.request = task, definition, request
        self.name, self.policy, self.codec = definition.name, definition.policy, definition.codec
        self.reporter = definition.reporter
        self.worker = _worker[0] if _worker else _first_delivery()
        self.task_id = str(request.id or _id_of_direct_call(task, request))
        identified = self._identify(args, kwargs)
        self.identity, self.fingerprint = identified.identity, identified.fingerprint
        self.has_callbacks = callbacks.brings_callbacks(request)
        self.is_broadcast = identified.identity.by_task_id and republish.is_broadcast(request)
        if self.policy.atomic:
            self.in_transaction = atomic.run_body
        if request.is_eager:
            self.open_transactions = task.transactions_around  # type: ignore[attr-defined]
        elif self.policy.on_stale == "requeue" and self.policy.mode != "observe":
            # Where a task is only observed, its second message would be a second run.
            self.message = self._as_message()

    def _identify(self, args: Args, kwargs: Kwargs) -> Identified:
        """Return what this delivery is about; almost all messages are answered without a look at the arguments.

        Raises:
            InvalidKey: if its stamp is malformed, or its key cannot be used.
        """
        definition, request, task_id = self.definition, self.request, self.task_id
        headers = request.headers or {}
        is_plain = headers.__class__ is dict and stamp.RAW.keys().isdisjoint(headers)
        if is_plain and not request.stamps and definition.policy.mode == "enforce":
            own: Any = headers.get(stamp.STAMP_HEADER)
            is_keyed = definition.keyed or definition.scoped
            if own is None and not (is_keyed or request.is_eager or request.replaced_task_nesting):
                return definition.identifier.by_task_id(task_id)
            is_ours = isinstance(own, dict) and own.get("id") == task_id and "key" in own
            if is_ours and _OF_THIS_MESSAGE.isdisjoint(own):
                return Identified.from_header(own, definition.identifier.namespace)  # type: ignore[return-value]  # it has a key
        headers = as_mapping(headers)
        identified = identify_delivery(
            definition,
            # A canvas may stamp the key on its tasks; then it is no header of ours that has it.
            {**as_mapping(request.stamps), **headers},
            args,
            kwargs,
            task_id=task_id,
            nesting=request.replaced_task_nesting or 0,
            eager=bool(request.is_eager),
        )
        info = stamp.read_stamp(headers, task_id)
        self.keeps_failure = stamp.KEEP_FAILURE in info
        if not _OF_THIS_MESSAGE.isdisjoint(info) or (definition.keyed and not info):
            # From here on they are this message's alone: the body may hand its headers to other calls. And should it be
            # published again, its key does not depend on what the body made of the arguments.
            request.headers = stamp.with_stamp(headers, task_id, identified)
        return identified

    def _as_message(self) -> bytes | None:
        """Return this message as a sweep would publish it again."""
        # As for a redelivery, its expiry no longer applies: the operation has begun in time.
        again = republish.as_published(self.task, self.request, expires=None)
        return self.definition.codec.dump_message(again)

    # -- the hooks of a run --------------------------------------------------------------------------------------------

    def open_store(self) -> Store:
        """Return the app's store."""
        try:
            return get_store(self.task.app)
        except InvalidOption as error:  # the message of a run comes back until there is a store
            raise StoreMisconfigured(str(error)) from error

    def write_end(self, end: SettleRequest) -> bool:
        """Write the end state; and the task's result with it, where that can be."""
        result = None
        if self.definition.fuses and end.state is State.COMPLETED:
            result = fused.write_of(self.task, self.request, self.store, end.value)
        if result is None:
            return self.store.settle(end)
        written = self.store.settle_with_result(end, result)
        if written is SettledWith.RESULT:
            self.request.ignore_result = True  # it is stored: Celery's tracer leaves it alone
        return written is not SettledWith.LOST

    def settled(self, state: EndState) -> None:
        """Have the record marked once Celery has sent the callbacks of this message."""
        if self.policy.mode == "enforce":
            callbacks.expect_callbacks(self, state, self.record.token)

    def is_over_time(self) -> bool:
        """Does the hard time limit of this delivery end the process? It comes as SIGTERM, a moment before SIGKILL."""
        task = self.task
        limit = (self.request.timelimit or (None,))[0] or task.time_limit
        limit = limit or pool_time_limits.get(task.app)
        if not limit:
            return False
        return time.monotonic() - self.started_at >= limit - max(_MARGIN_S, _MARGIN * limit)

    def longest_wait_ms(self) -> int | None:
        """Return how long this delivery may hold its worker while another runs; ``None``: as its policy wants.

        Past the visibility timeout the broker gives a waiting message to one process after the other, and all of them
        wait.
        """
        if self.request.is_eager:
            return 0
        return int(republish.unacknowledged_s(self.task) * 1000) if self.task.acks_late else None

    conflict = republish.conflict
    store_failed = republish.after_store_failure

    def replay(self, record: Record, age_ms: int) -> object:
        """Answer from the record: return its value or raise its exception.

        A redelivery of the very message that settled it sends the callbacks that the first delivery did not; any other
        duplicate is a link of its own chain, a member of its own chord.
        """
        request, own = self.request, record.task_id == self.request.id
        if own and record.delivered:
            request.callbacks = request.errbacks = request.chain = request.chord = None
        if record.state is State.FAILED:
            error = self.definition.codec.load_error(record.value)
            self._expect_replayed(record, age_ms)
            raise error
        if record.replaced and own:
            raise Ignore(f"{record.identity} is carried on by the task that replaced this one")
        if record.value is not None:
            value = self.codec.load_value(record.value)
        elif own and not self.has_callbacks and self._keeps_no_result():
            return None
        else:
            value = self._from_backend(record, age_ms)
        self._expect_replayed(record, age_ms)
        if self.definition.fuses:
            with suppress(Exception):  # else Celery's tracer stores it, in two trips
                result = fused.write_of(self.task, request, self.store, record.value)
                if result is not None and self.store.write_result(result):
                    request.ignore_result = True
        return value

    def _keeps_no_result(self) -> bool:
        """Is the result of this message stored nowhere?"""
        return self.request.ignore_result or isinstance(self.task.backend, DisabledBackend)

    def _expect_replayed(self, record: Record, age_ms: int) -> None:
        """Have the record marked when Celery has sent the callbacks of this message."""
        request = self.request
        if not callbacks.brings_callbacks(request):
            return
        is_part = request.chord and not request.is_eager
        if is_part and callbacks.chord_is_claimed(self.task, request):
            republish.after_chord_claim(self)
        # A duplicate under another task id did not settle the record.
        token = record.token if record.task_id == request.id else None
        callbacks.expect_callbacks(self, record.state, token, age_ms=age_ms)

    def _from_backend(self, record: Record, age_ms: int) -> object:
        """Look for a result that is not in the record where its task left it."""
        task, policy = self.task, self.policy
        state, value = "", None
        if not isinstance(task.backend, DisabledBackend):
            first = task.AsyncResult(record.task_id)
            state, value = first.state, first.result
        if state == "SUCCESS":
            return value
        if state == "FAILURE" and isinstance(value, Exception):
            raise value
        # A replacement may take its time; but once the record is gone, the duplicate would run.
        wait_ms = policy.settled_keep_ms // 2 if record.replaced else policy.lease_ms
        if state and age_ms < wait_ms and record.task_id != self.request.id:
            republish.conflict(self, record, policy.lease_ms)
        raise ResultUnavailable(
            f"{record.identity} was completed by task {record.task_id}, but its result was not kept in the record "
            "and is not in the result backend."
        )


def deliver(
    task: DefinedTask,
    definition: Definition,
    request: Any,
    call_next: Callable[..., object] | None,
    args: Args,
    kwargs: Kwargs,
) -> object:
    """Run a delivery by the protocol; the body is ``run``, or what other bases put around it.

    ``call_next``: a base before ours on the way to ``run``.
    """
    run = Delivery(task, definition, request, args, kwargs)
    vars(request)[RUN] = run
    callbacks.settled_run.set(None)
    if call_next is None:
        call_next = next_after_ours(run)
    body: Callable[[], object] = partial(call_next, *args, **kwargs)
    if definition.policy.atomic:
        # It may run again, and its message be published again: with the arguments as they were.
        body = partial(_call_with_copies, call_next, args, kwargs)
    while True:
        try:
            return execute(run, body)
        except republish.NotRepublishedError:  # noqa: PERF203  after a pause; what ran is recorded
            continue


def delivery_of(request: object) -> Delivery | None:
    """Return the delivery that a call belongs to, ``None`` if it is a new one.

    Some pools (celery-aio-pool) keep one request object for all deliveries of a task: a mark counts only in the context
    of its body.
    """
    run: Delivery | None = vars(request).get(RUN)
    return run if run is not None and run is current_run.get() else None


def next_after_ours(run: Delivery) -> Callable[..., object]:
    """Return what is behind our class: ``run``, or another base on the way to it."""
    run.reached_run = True
    if run.definition.call_behind is not None:
        return partial(run.definition.call_behind, run.task)
    # Celery's own mark on a request whose body is entered: a task that calls itself is a plain call.
    run.request._protected = 1  # noqa: SLF001
    return run.task.run


# -- to begin ----------------------------------------------------------------------------------------------------------


def _first_delivery() -> str:
    """Prepare this process: its name, and in a pool child the shield.

    Not at ``worker_process_init``: billiard sets the child's signal handlers after that.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and hasattr(signal, "SIGUSR1"):
        handler = signal.getsignal(signal.SIGUSR1)
        if getattr(handler, "__module__", "") == "billiard.pool":
            shield.install(signal.SIGUSR1, signal.SIGTERM)
    _worker.append(worker_name(os.getpid()))
    return _worker[0]


def identify_delivery(
    definition: Definition,
    headers: Mapping[str, object],
    args: Args,
    kwargs: Kwargs,
    *,
    task_id: str,
    nesting: int = 0,
    eager: bool = False,
) -> Identified:
    """Return what a message is about: its stamp, else what its publisher's headers or its arguments say.

    An ``eager`` call without a key gets a key of its own: Celery gives all steps of an eager chain one task id.

    Raises:
        InvalidKey: if the stamp is malformed, or the key cannot be used.
    """
    try:
        header = stamp.stamp_of(headers, task_id)
        stamped = Identified.from_header(header, definition.identifier.namespace)
    except InvalidKey as error:
        return definition.observed(error, task_id)
    if stamped is not None:
        return stamped
    info = stamp.read_stamp(headers, task_id)
    return definition.identify(
        args,
        kwargs,
        task_id=uuid() if eager else stamp.message_id(info, task_id),
        nesting=nesting,
        key=info.get(stamp.RAW_KEY),
        scope=info.get(stamp.RAW_SCOPE),
    )


def _id_of_direct_call(task: DefinedTask, request: Any) -> str:
    """Return an id for a call as a function, which has none: the same for as long as the call lasts."""
    if request is not task.request_stack.top:
        return uuid()  # of run() itself, whose calls share one request
    made: str = vars(request).setdefault("idempotency_call", uuid())
    return made


def copied(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return copies of the arguments of a call; themselves, if one of them cannot be copied."""
    try:
        return deepcopy((args, kwargs))
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001  an object of any kind
        return args, kwargs


def _call_with_copies(call_next: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    args, kwargs = copied(args, kwargs)
    return call_next(*args, **kwargs)
