"""One delivery of a task: from Celery's request to a run of the protocol, and from its answer to Celery.

::

    request ─ identify ─▶ Delivery ─ execute ─┬─▶ body ─ settle (and result) ─ the value is returned: SUCCESS
                                              ├─▶ replay: the stored value is returned, or the stored error raised
                                              └─▶ conflict, store failure: republished, dropped or failed
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
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils import uuid

from celery_idempotent.celery import callbacks, fused, republish
from celery_idempotent.celery.definition import Definition
from celery_idempotent.errors import InvalidOption, ResultUnavailable, StoreMisconfigured
from celery_idempotent.keys import stamp
from celery_idempotent.keys.stamp import Identified, as_mapping
from celery_idempotent.protocol import atomic, shield
from celery_idempotent.protocol.claim import current_run
from celery_idempotent.protocol.run import COMPLETED, execute
from celery_idempotent.records import EndState, Record, SettleRequest, State
from celery_idempotent.signals import worker_name
from celery_idempotent.stores import get_store
from celery_idempotent.stores.opening import opened

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

#: A run that ends this close to its limit, in seconds or as a share of it, has met the limit, which began earlier.
_MARGIN_S, _MARGIN = 0.5, 0.1

#: Words of a stamp that a publisher set in its own headers.
_OF_THIS_MESSAGE = frozenset({stamp.RAW_KEY, stamp.RAW_SCOPE, stamp.KEEP_FAILURE})


def _current_id() -> str | None:
    """Return the id of the task that this thread is busy with."""
    return getattr(getattr(get_current_task(), "request", None), "id", None)


class Delivery(republish.DeliveredRun):
    """One delivery of a message, or one eager call."""

    control = (Ignore, Reject, Retry)
    #: All bases are passed: further calls are the body's.
    reached_run = False

    def __init__(
        self, task: DefinedTask, definition: Definition, request: Any, args: Args, kwargs: Kwargs
    ) -> None:
        self.task, self.definition, self.request = task, definition, request
        self.sender, self.args, self.kwargs = task, args, kwargs
        self.name, self.policy, self.codec = definition.name, definition.policy, definition.codec
        self.store = opened.get(definition.app)  # type: ignore[assignment]  # None: open_store() opens it
        self.worker = _prepare_process(os.getpid())
        self.task_id = str(request.id or uuid())  # a function call has none
        identified = self._identify()
        self.identity, self.fingerprint = identified.identity, identified.fingerprint
        self.has_callbacks = any(callbacks.callbacks_of(request))
        if self.identity.by_task_id:
            self.is_broadcast = republish.is_broadcast(request)
        if self.policy.atomic:
            self.in_transaction = atomic.run_body
        if self.policy.publish_once == "until_start" and not request.is_eager:
            self.waits_at = self.identity.waiting
        if request.is_eager:
            self.open_transactions = getattr(task, "transactions_around", None)
        elif self.policy.on_stale == "requeue" and self.policy.mode != "observe":
            # Only observed, it would run twice.
            self.message = self._dump_message()  # for the sweep

    def _identify(self) -> Identified:
        """Return the identity of this delivery, or raise ``InvalidKey``."""
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
            # A canvas may stamp the key on its tasks.
            {**as_mapping(request.stamps), **headers},
            self.args,
            self.kwargs,
            task_id=task_id,
            nesting=request.replaced_task_nesting or 0,
            eager=bool(request.is_eager),
        )
        info = stamp.read_stamp(headers, task_id)
        self.keeps_failure = stamp.KEEP_FAILURE in info
        if not _OF_THIS_MESSAGE.isdisjoint(info) or (definition.keyed and not info):
            # The body may hand its headers to other calls, and change the arguments before a republish.
            request.headers = stamp.with_stamp(headers, task_id, identified)
        return identified

    def _dump_message(self) -> bytes | None:
        """Serialize this message without an expiry: the operation has begun."""
        again = republish.as_published(self.task, self.request, expires=None)
        return self.definition.codec.dump_message(again)

    # -- the hooks of a run --------------------------------------------------------------------------------------------

    def open_store(self) -> Store:
        """Return the app's store."""
        try:
            return get_store(self.task.app)
        except InvalidOption as error:  # the message comes back until there is a store
            raise StoreMisconfigured(str(error)) from error

    def write_end(self, end: SettleRequest) -> bool:
        """Write the end state, and the task's result with it if possible."""
        result = None
        if self.definition.fuses and end.state is COMPLETED:
            result = fused.write_of(self.task, self.request, self.store, end.value)
        if result is None:
            return self.store.settle(end)
        written = self.store.settle_with_result(end, result)
        if written == "stored":
            self.request.ignore_result = True  # Celery's tracer leaves it alone
        return written != "lost"

    def after_settle(self, state: EndState) -> None:
        """Have the record marked once Celery has sent the callbacks."""
        if self.policy.mode == "enforce":
            callbacks.expect_callbacks(self, state, self.record.token)

    def kept_message(self) -> bytes | None:
        """Return the message, where a record is to keep it; of one that is only observed, which ran, none."""
        if self.request.is_eager or self.policy.mode == "observe":
            return None
        if not (self.keeps_arguments or self.message):
            return None
        if self.newest is not None:
            self.take_newest()
            return self._dump_message()
        return self.message or self._dump_message()

    @property
    def keeps_arguments(self) -> bool:
        """Does the record of a failure have the message, whose arguments the body may change?"""
        return self.policy.keep_message or self.keeps_failure

    def take_newest(self) -> None:
        """Take the arguments of the newest call that this one stands for."""
        if self.newest is not None and not self.request.retries:  # a retry has its own
            newest = self.definition.codec.load_message(self.newest)
            self.args, self.kwargs = newest.args, newest.kwargs
            self.request.args, self.request.kwargs = newest.args, newest.kwargs  # for a retry

    def is_over_time(self) -> bool:
        """Does the hard time limit end the process? It comes as SIGTERM, a moment before SIGKILL."""
        limit = (self.request.timelimit or (None,))[0] or self.task.time_limit
        limit = limit or pool_time_limits.get(self.task.app)
        if not limit:
            return False
        return time.monotonic() - self.started_at >= limit - max(_MARGIN_S, _MARGIN * limit)

    def longest_wait_ms(self) -> int | None:
        """Return how long this delivery may wait in its worker while another runs; ``None``: as its policy wants."""
        if self.request.is_eager:
            return 0
        # After the visibility timeout it would be delivered again, to wait in one process after the other.
        return int(republish.unacknowledged_s(self.task) * 1000) if self.task.acks_late else None

    conflict = republish.conflict
    store_failed = republish.after_store_failure

    def replay(self, record: Record, age_ms: int) -> object:
        """Answer from the record: return its value or raise its exception.

        Celery then sends the callbacks of this message, unless it settled the record itself and they were sent.
        """
        request, own, sends = self.request, record.task_id == self.request.id, self.has_callbacks
        request.idempotency_replayed = True
        if own and record.delivered:
            request.callbacks = request.errbacks = request.chain = request.chord = None
            sends = False
        error, value = None, None
        if not own and request.id in record.copies:
            raise Ignore(f"this is a copy of a message of {record.identity} whose run has ended")
        if record.state is State.FAILED:
            error = self.definition.codec.load_error(record.value)
        elif record.replaced and own:
            raise Ignore(f"{record.identity} is carried on by the task that replaced this one")
        elif record.value is not None:
            value = self.codec.load_value(record.value)
        else:
            value = self._from_backend(record, age_ms)
        if sends:
            is_part = request.chord and not request.is_eager
            if is_part and callbacks.chord_is_claimed(self.task, request):
                republish.after_chord_claim(self)
            # A duplicate under another task id did not settle the record.
            token = record.token if own else None
            callbacks.expect_callbacks(self, record.state, token, age_ms=age_ms)
        if error is not None:
            raise error
        # Celery's tracer compares what is there already: its own success, or STARTED.
        if self.definition.fuses and not (own or self.task.track_started):
            with suppress(Exception):  # else Celery's tracer stores it, in two trips
                result = fused.write_of(self.task, request, self.store, record.value)
                if result is not None and self.store.write_result(result):
                    request.ignore_result = True
        return value

    def _from_backend(self, record: Record, age_ms: int) -> object:
        """Return the result that the first task left in the result backend."""
        task, policy, own = self.task, self.policy, record.task_id == self.request.id
        is_kept = not isinstance(task.backend, DisabledBackend)
        if own and not self.has_callbacks and (self.request.ignore_result or not is_kept):
            return None  # it is stored nowhere
        state, value = "", None
        if is_kept:
            first = task.AsyncResult(record.task_id)
            state, value = first.state, first.result
        if state == "SUCCESS":
            return value
        if state == "FAILURE" and isinstance(value, Exception):
            raise value
        # A replacement may take long, until the record is gone and the duplicate would run. Eager calls store nothing.
        wait_ms = policy.settled_keep_ms // 2 if record.replaced else policy.lease_ms
        may_come = record.replaced or not self.request.is_eager
        if state and age_ms < wait_ms and may_come and not own:
            republish.conflict(self, record, policy.lease_ms)
        raise ResultUnavailable(
            f"{record.identity} was completed by task {record.task_id}, but its result was not kept in the record "
            "and is not in the result backend."
        )


def deliver(run: Delivery, call_next: Callable[..., object] | None = None) -> object:
    """Run a delivery by the protocol; ``call_next``: the ``__call__`` of a base before ours, if one has it."""
    vars(run.request)[RUN] = run
    if callbacks.settled_run.get() is not None:
        callbacks.settled_run.set(None)
    call = call_next or next_after_ours(run)
    body = partial(call, *run.args, **run.kwargs)
    if run.policy.atomic or run.keeps_arguments or run.policy.on_duplicate == "replace":
        body = partial(_call_as_it_is_now, call, run)
    try:
        while True:
            run.request.idempotency_replayed = False  # for hooks and receivers; replay() sets it
            try:
                return execute(run, body)
            except republish.NotRepublishedError:  # after a pause; what ran is recorded
                continue
    finally:
        # They refer to each other, and would wait for the garbage collector.
        vars(run.request).pop(RUN, None)


def _call_as_it_is_now(call: Callable[..., object], run: Delivery) -> object:
    run.take_newest()
    args, kwargs = run.args, run.kwargs
    if run.policy.atomic or run.keeps_arguments:
        # It may run again, or its message be published again: with the arguments as they were.
        args, kwargs = copied(args, kwargs)
    return call(*args, **kwargs)


def delivery_of(request: object) -> Delivery | None:
    """Return the delivery that a call belongs to, ``None`` if it is a new one."""
    run: Delivery | None = vars(request).get(RUN)
    # Pools such as celery-aio-pool have one request object for all deliveries.
    return run if run is not None and run is current_run.get() else None


def next_after_ours(run: Delivery) -> Callable[..., object]:
    """Return ``run``, or the ``__call__`` of another base on the way to it."""
    run.reached_run = True
    if run.definition.call_behind is not None:
        return partial(run.definition.call_behind, run.task)
    # As Celery marks it: a task that calls itself is a plain call.
    run.request._protected = 1  # noqa: SLF001
    body: Callable[..., object] = run.task.run
    return body


@cache
def _prepare_process(pid: int) -> str:
    """Install the shield if this is a pool child, and return how records name this process."""
    # Not at worker_process_init: billiard sets the child's signal handlers after that.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and hasattr(signal, "SIGUSR1"):
        handler = signal.getsignal(signal.SIGUSR1)
        # Ours already, if a signal struck here before.
        if getattr(handler, "__module__", "") in ("billiard.pool", shield.__name__):
            made = shield.Shield(_current_id)
            held = shield.shields.setdefault(threading.get_ident(), made)
            held.hold(signal.SIGUSR1, signal.SIGTERM)
    return worker_name(pid)


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
    """Return the identity of a message: from its stamp, else from its publisher's headers or its arguments.

    Raises:
        InvalidKey: if the stamp is malformed, or the key cannot be used.
    """
    info = stamp.read_stamp(headers, task_id)
    return definition.identify(
        args,
        kwargs,
        header=stamp.stamp_of(headers, task_id),
        task_id=uuid() if eager else stamp.message_id(info, task_id),
        nesting=nesting,
        key=info.get(stamp.RAW_KEY),
        scope=info.get(stamp.RAW_SCOPE),
    )


def copied(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return copies of the arguments of a call; themselves, if one of them cannot be copied."""
    try:
        return deepcopy((args, kwargs))
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001  an object of any kind
        return args, kwargs
