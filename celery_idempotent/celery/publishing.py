"""Publishing one call: identify it, stamp its headers, reserve its key if the task wants that, send it.

::

    apply_async ─ identify ─ stamp ─┬─ send
                                    ├─ reserve the key ─ send        idempotency_publish_once
                                    ├─ release the key ─ send        a run publishes its own retry
                                    └─ defer ─ commit ─ send         the outbox takes it

A call whose key is reserved, held or settled gets ``AsyncResult(first)``. If a producer dies before it sends, the
reservation's deadline passes, and the next call sends under the same task id. The table of all cases, which the outbox
and ``enqueue()`` follow as well, is in docs/internals.md.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar

from celery.canvas import Signature, maybe_signature
from celery.exceptions import Reject
from celery.utils import uuid

from celery_idempotent import signals
from celery_idempotent.celery.canvas import AnySignature, Place, derive_ids, with_tasks
from celery_idempotent.celery.definition import (
    DefinedTask,
    Definition,
    is_celerys_own,
)
from celery_idempotent.celery.typed import AnyCelery, CallResult, Options
from celery_idempotent.errors import DuplicateCall, FingerprintMismatch, IdempotencyError
from celery_idempotent.keys import stamp
from celery_idempotent.keys.stamp import Identified, as_mapping, read_stamp, with_stamp
from celery_idempotent.protocol.run import Run, give_back, run_in_progress
from celery_idempotent.records import (
    EarlierCall,
    Held,
    Identity,
    Mismatched,
    Record,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
    State,
)
from celery_idempotent.signals import Call, Line, report
from celery_idempotent.stores import Store, get_store

logger = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[..., CallResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredCall:
    """A call to be sent later, stamped already; ``reserve``: once its key is reserved."""

    args: Sequence[object] | None
    kwargs: Mapping[str, object] | None
    options: Options
    reserve: bool = False


Interceptor = Callable[["DefinedTask", DeferredCall], CallResult]
#: Receives the next call of a task in place of the broker. The outbox sets it for one ``apply_async``.
outbox_interceptor: ContextVar[Interceptor | None] = ContextVar("interceptor", default=None)

#: A call with one of these options keeps its own task id, on which others depend, and so reserves no key.
_NEED_OWN_TASK_ID = ("task_id", "chord", "chain", "group_id", "group_index", "link", "link_error")

#: Options that belong to the process which sends.
SENDER_OPTIONS = ("producer", "publisher", "connection", "router")

#: A message that has not started this long after its ETA is taken for lost.
RESERVED_MS = 60_000


def publish(
    task: DefinedTask,
    definition: Definition | None,
    send: Send,
    args: Any,
    kwargs: Any,
    options: Options,
) -> CallResult:
    """Publish one call through ``send(args, kwargs, **options)``; ``options`` are all of ``apply_async``'s.

    Raises:
        InvalidKey: if the key or scope cannot be used, or is missing where one is required.
        FingerprintMismatch: if the key to reserve belongs to a call with other arguments.
    """
    if (intercept := outbox_interceptor.get()) is not None:
        outbox_interceptor.set(None)  # it is for one call
    if definition is None:
        if not is_celerys_own(task):
            take_key(options)
        call = DeferredCall(args=args, kwargs=kwargs, options=options)
        return send(args, kwargs, **options) if intercept is None else intercept(task, call)
    retrying = _retrying_run(task, definition, options) if options.get("retries") else None
    # Before stamp_call() adds a task id.
    reserve = (
        definition.policy.publish_once
        and definition.policy.mode == "enforce"
        and retrying is None
        and not task.app.conf.task_always_eager
        and not any(options.get(name) is not None for name in _NEED_OWN_TASK_ID)
    )
    identified = stamp_call(definition, args, kwargs, options, retrying)
    if options.get("link") or options.get("link_error"):
        give_ids_to_callbacks(task.app, options)
    if chain := options.get("chain"):
        run = options["task_id"] = options.get("task_id") or uuid()
        options["chain"] = [with_run(task.app, chain[0], run), *chain[1:]]
    # A key that is only the task id belongs to this message alone: there is nothing to reserve.
    reserve = reserve and identified is not None and not identified.identity.by_task_id
    if intercept is not None:
        call = DeferredCall(args=args, kwargs=kwargs, options=options, reserve=reserve)
        return intercept(task, call)
    if retrying is not None:
        return _send_retry(task, retrying, partial(send, args, kwargs), options)
    if reserve and identified is not None:
        call = DeferredCall(args=args, kwargs=kwargs, options=options)
        return _Publication(task, definition, identified, send, call).make()
    return send(args, kwargs, **options)


def stamp_call(
    definition: Definition,
    args: Any,
    kwargs: Any,
    options: Options,
    retrying: Run | None = None,
    *,
    eager: bool = False,
) -> Identified | None:
    """Move the key from ``options`` to a stamp in the headers, and return the identity.

    ``None``: the headers have this message's stamp already, or neither call nor task has a key. ``retrying``: the run
    whose key is the default. ``eager``: the default is a random key, as all steps of an eager chain have one task id.
    """
    headers, task_id = options.get("headers"), options.get("task_id")
    key, scope = take_key(options)
    given = key is not None or scope is not None
    headers = as_mapping(headers) if headers else {}
    in_headers = read_stamp(headers, task_id) if headers else {}
    if "key" in in_headers and not given:
        return None
    if retrying is not None and not given:
        identified = Identified(retrying.identity, retrying.record.fingerprint)
    else:
        # First the key of this call, then Celery's stamp of a canvas, which take_key() left in options, then a header.
        if key is None:
            key = options.get(stamp.KEY_HEADER, in_headers.get(stamp.RAW_KEY))
        if scope is None:
            scope = options.get(stamp.SCOPE_HEADER, in_headers.get(stamp.RAW_SCOPE))
        if key is None and scope is None and not definition.keyed:
            return None
        task_id = options["task_id"] = task_id or uuid()
        identified = definition.identify(
            args,
            kwargs,
            task_id=uuid() if eager else stamp.message_id(in_headers, task_id),
            # A replacement (``self.replace``) has the task id of the task that it replaces.
            nesting=options.get("replaced_task_nesting") or 0,
            key=key,
            scope=scope,
        )
    options["headers"] = with_stamp(headers, str(task_id), identified)
    return identified


def take_key(options: Options) -> tuple[object, object]:
    """Remove key and scope from the options of a call and return them, unless they are Celery's stamps."""
    stamped = options.get("stamped_headers") or ()
    key = None if stamp.KEY_HEADER in stamped else options.pop(stamp.KEY_HEADER, None)
    scope = None if stamp.SCOPE_HEADER in stamped else options.pop(stamp.SCOPE_HEADER, None)
    return key, scope


def give_ids_to_callbacks(app: AnyCelery, options: Options) -> None:
    """Derive the ids of callbacks from the call's own: a callback that is sent twice keeps its id."""
    for kind in ("link", "link_error"):
        if options.get(kind):
            options["task_id"] = options.get("task_id") or uuid()
            options[kind] = derive_ids(app, options[kind], options["task_id"], kind)


def send_deferred(
    task: DefinedTask, definition: Definition | None, send: Send, call: DeferredCall
) -> CallResult:
    """Send a deferred call: the same message each time."""
    call = replace(call, options=dict(call.options))
    if call.reserve and definition is not None:
        headers, task_id = as_mapping(call.options.get("headers")), call.options.get("task_id")
        stamped = stamp.stamp_of(headers, task_id)
        identified = Identified.from_header(stamped, definition.identifier.namespace)
        try:
            if identified is not None:
                return _Publication(task, definition, identified, send, call, is_staged=True).make()
        except FingerprintMismatch as error:
            # The caller is gone. The worker refuses the message, and its result has this error.
            logger.warning("idempotency: %s[%s]: %s", task.name, task_id, error)
    return send(call.args, call.kwargs, **call.options)


def absolute(options: Mapping[str, object], *, task: str) -> Options:
    """Return options in which delays are points in time; raise ``IdempotencyError`` for one of this process only."""
    kept: Options = dict(options)
    if found := [name for name in SENDER_OPTIONS if kept.pop(name, None) is not None]:
        raise IdempotencyError(
            f"A call of {task} cannot be staged with {', '.join(found)}: the sender has its own connection."
        )
    now = datetime.now(timezone.utc)
    if countdown := kept.pop("countdown", None):
        kept["eta"] = countdown
    for name in ("eta", "expires"):
        value = kept.get(name)
        if isinstance(value, numbers.Real):
            value = now + timedelta(seconds=float(value))
        if isinstance(value, datetime):
            kept[name] = value.isoformat()
    return kept


def _retrying_run(task: DefinedTask, definition: Definition, options: Options) -> Run | None:
    """Return the run in progress if this call is its retry, no replacement with the same task id."""
    run = run_in_progress()
    if run is None or run.task_id != options.get("task_id"):
        return None
    same_task = run.identity.namespace == definition.identifier.namespace
    return run if same_task and options["retries"] > (task.request.retries or 0) else None


def _send_retry(task: DefinedTask, retrying: Run, send_call: Send, options: Options) -> CallResult:
    """Release the key of a run, then publish its retry; an atomic run does both after its rollback."""
    free = partial(give_back, retrying, requeue_ms=lost_after_ms(options))
    if retrying.transaction is None:
        free()
        return send_call(**options)

    def after_rollback() -> None:
        free()
        try:
            send_call(**options)
        except Exception as error:
            raise Reject(error, requeue=False) from error  # as Task.retry() does

    retrying.after_rollback = after_rollback
    return task.AsyncResult(options["task_id"])


class _UnreservedError(Exception):
    """The store did not take a reservation."""


class ReservedCall(Call):
    """One call whose key is reserved before its message is sent; a subclass sends it."""

    #: An outbox sends it, maybe twice.
    is_staged = False
    #: The end of another task answers nobody, if its policy says so.
    each_runs = True
    #: The message belongs to a transaction that may be rolled back.
    uncommitted = False

    task: DefinedTask
    definition: Definition
    store: Store
    identity: Identity
    fingerprint: bytes | None

    # -- the caller's part ---------------------------------------------------------------------------------------------

    #: Returns after how long the message is taken for lost.
    deadline_ms: Callable[[], int]
    #: Sends the message of a reservation, or sees to it that it is sent.
    queue: Callable[[Record], None]
    #: Returns the message, for a task id, that a sweep sends if no worker claims the key in time; ``None``: none.
    message: Callable[[str], bytes | None]
    #: Does an earlier call answer? Reports it; ``False``: reserve again, after a pause or a write.
    is_answered: Callable[[Held | Settled], bool]

    def ask(self, verb: Callable[[], T]) -> T:
        """Return the answer of the store, or raise the outcome of a call without one."""
        raise NotImplementedError

    # -- the decision --------------------------------------------------------------------------------------------------

    def reserve_and_send(self, task_id: str) -> tuple[Record, bool]:
        """Send the call; return the record, and whether it is that of an earlier call, which answers.

        Raises:
            FingerprintMismatch: if the key belongs to a call with other arguments.
        """
        message = None if self.uncommitted else self.message(task_id)
        while True:
            answer = self.reserve(task_id, message)
            record = answer.record
            match answer:
                case Reserved() if record.task_id != task_id and message is not None:
                    # The message in the record has to have its task id.
                    task_id, message = record.task_id, self.message(record.task_id)
                case Reserved():
                    try:
                        self.queue(record)
                    except BaseException:
                        self.give_back(record)
                        raise
                    return record, False
                case Mismatched():
                    report(self, signals.mismatched, record)
                    raise FingerprintMismatch(
                        f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a "
                        "key identifies one operation."
                    )
                case Held() | Settled() if self.is_answered(answer):
                    return record, True

    def reserve(self, task_id: str, message: bytes | None) -> Reservation:
        """Reserve the key for a task id: with its message, until that is lost."""
        policy = self.definition.policy
        request = ReserveRequest(
            identity=self.identity,
            fingerprint=self.fingerprint,
            task_id=task_id,
            deadline_ms=self.deadline_ms(),
            keep_ms=policy.keep_ms,
            message=message,
            uncommitted=self.uncommitted,
            copies=(task_id,) if self.is_staged else (),
            each_runs=policy.each_runs and self.each_runs,
        )
        return self.ask(partial(self.store.reserve, request))

    def give_back(self, record: Record) -> None:
        """Release a reservation whose message is not sent; if the store fails, its deadline ends it."""
        try:
            self.store.release(record.identity, token=record.token)
        except IdempotencyError as error:
            line = "idempotency: %s is reserved until its deadline: %s"
            logger.warning(line, record.identity, error)


class _Publication(ReservedCall):
    """A call of a task with ``idempotency_publish_once``; ``sent`` is its result once it is sent."""

    sent: CallResult

    def __init__(
        self,
        task: DefinedTask,
        definition: Definition,
        about: Identified,
        send: Send,
        call: DeferredCall,
        *,
        is_staged: bool = False,
    ) -> None:
        self.task, self.definition, self.is_staged = task, definition, is_staged
        self.name, self.sender, self.store = definition.name, task, get_store(task.app)
        self.send, self.call, self.options = send, call, call.options
        self.task_id, self.key = call.options["task_id"], about.identity
        self.until_start = definition.policy.publish_once == "until_start"
        self.identity = self.key.waiting if self.until_start else self.key
        self.fingerprint = about.fingerprint

    def deadline_ms(self) -> int:
        return lost_after_ms(self.options)

    def message(self, task_id: str) -> bytes | None:
        keeps = self.definition.policy.keep_message
        return message_of(self.task, self.definition, self.call, task_id) if keeps else None

    def is_answered(self, earlier: Held | Settled) -> bool:
        record, newest = earlier.record, None
        replaces = self.definition.policy.on_duplicate == "replace" and not self.is_staged
        if isinstance(earlier, Held) and replaces and record.task_id != self.task_id:
            newest = message_of(self.task, self.definition, self.call, record.task_id)
        if newest is not None:
            replace = partial(self.store.replace, token=record.token, message=newest)
            if not self.ask(partial(replace, record.identity)):
                return False
        if self.answers(record):
            report(self, signals.replayed, record)
        return True

    def answers(self, record: Record) -> bool:
        """Does the record answer the call here? Else a worker does, and reports that."""
        # A sweep or an operator writes no result under the first id: then a worker answers this message.
        return record.state is not State.FAILED and not record.settled_by_operator

    def ask(self, verb: Callable[[], T]) -> T:
        try:
            return verb()
        except IdempotencyError as error:
            line = Line(logging.WARNING, "{event.task} is published unreserved: {event.error}")
            report(self, signals.store_failed, error=error, line=line)
            raise _UnreservedError from error

    def queue(self, record: Record) -> None:
        _use_task_id(self.options, record.task_id)
        self.sent = self.send_now()
        self.task_id = record.task_id
        report(self, signals.reserved, record, state=State.QUEUED)

    def send_now(self) -> CallResult:
        """Send the message as it is."""
        return self.send(self.call.args, self.call.kwargs, **self.options)

    def make(self) -> CallResult:
        """Reserve the key and send the call; return its result, or that of an earlier call."""
        try:
            if self.is_staged and self.until_start:
                # Sent before: it may have started, and left its place.
                found = self.ask(partial(self.store.get, self.key))
                if found is not None and self.task_id in (found.task_id, *found.copies):
                    return self.task.AsyncResult(self.task_id)
            record, is_duplicate = self.reserve_and_send(self.task_id)
        except _UnreservedError:
            # The worker's claim still guards the run: a second message does no harm.
            return self.send_now()
        if not is_duplicate:
            return _note_duplicate(self.sent, None)
        if self.definition.policy.on_duplicate == "raise" and not self.is_staged:
            raise DuplicateCall(
                f"{self.key} was called before: task {record.task_id} is {record.state.value}.",
                record.task_id,
                record.state.value,
            )
        answer = self.task.AsyncResult(record.task_id) if self.answers(record) else self.send_now()
        return _note_duplicate(answer, record)


def _note_duplicate(result: Any, record: Record | None) -> CallResult:
    """Let the result of a call that reserved its key say which earlier call's ``record`` it met, ``None``: none."""
    result.duplicate = record is not None
    if record is not None:
        result.earlier = EarlierCall(record.task_id, record.state, record.updated_at)
    return result  # type: ignore[no-any-return]


def message_of(
    task: DefinedTask, definition: Definition, call: DeferredCall, task_id: str
) -> bytes | None:
    """Return the message of a call as a record keeps it, ``None`` if it runs eagerly or cannot be serialized."""
    if task.app.conf.task_always_eager:
        return None
    given: dict[str, Any] = {"expires": task.expires, **call.options}
    for name in SENDER_OPTIONS:
        given.pop(name, None)
    options = absolute(given, task=str(task.name))
    _use_task_id(options, task_id)
    stamp_call(definition, call.args, call.kwargs, options)
    again = task.signature(tuple(call.args or ()), dict(call.kwargs or {}), options=options)
    return definition.codec.dump_message(again)


def _use_task_id(options: Options, task_id: str) -> None:
    """Give a call and its stamp the task id that its key has already."""
    headers = options.get("headers") or {}
    stamped = read_stamp(headers, options.get("task_id"))
    options |= {"task_id": task_id, "headers": with_stamp(headers, task_id, more=stamped)}


def lost_after_ms(options: Options) -> int:
    """Return after how many milliseconds a message with these options is taken for lost."""
    wait, eta = float(options.get("countdown") or 0), options.get("eta")
    if not wait and eta:
        eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
        eta = eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)
        wait = (eta - datetime.now(timezone.utc)).total_seconds()
    return RESERVED_MS + max(int(wait * 1000), 0)


def with_run(app: AnyCelery, step: object, run: str) -> object:
    """Return a copy of a chain's last step whose stamp has ``run``, the task id of the chain's first step.

    A chain object that is applied twice gives its last step one task id: without ``run`` the second one would be a
    redelivery of the first.
    """

    def marked(task: AnySignature, _: Place) -> AnySignature:
        options = task.get("options") or {}
        headers, task_id = as_mapping(options.get("headers")), options.get("task_id")
        if not task_id or stamp.RUN in read_stamp(headers, task_id):
            return task
        headers = with_stamp(headers, task_id, more={stamp.RUN: run})
        return {**task, "options": {**options, "headers": headers}}

    last = with_tasks(step, marked)
    if not isinstance(step, Signature):
        return last
    made: Any = maybe_signature(last, app=app)
    made.update(last)  # a chord writes its header in another form when it is made
    return made
