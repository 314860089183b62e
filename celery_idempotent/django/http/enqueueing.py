"""``enqueue``: from a request to a task under one key, with the same answer to each repetition.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202; 409 while the first request is not committed
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved again
                    └─ Mismatched ▶ 422

A 202 holds even if this process dies. A reservation is *uncommitted* until its message is sure to be sent: until then
its deadline is near. After that the record, or an outbox, has the message, and a sweep sends it::

    no transaction   reserve (60 s, with the message) ─ send ─ 202
    transaction      reserve (2 s) ─ 202 ─┬─ COMMIT ─ reserve again (60 s, with the message) ─ send
                                          └─ ROLLBACK, or the process dies: the deadline passes, a repetition is queued
    outbox           reserve (2 s), stage the message ─ COMMIT ─ reserve again, as above ─ send, or a sweep sends

On SQLite the reservation is itself part of the transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.http import HttpResponse, JsonResponse
from kombu.exceptions import OperationalError

from celery_idempotent import backoff, signals
from celery_idempotent.celery.delivery import copied
from celery_idempotent.celery.publishing import lost_after_ms, release_reservation, stamp_call
from celery_idempotent.celery.typed import Options
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.bodies import receive
from celery_idempotent.django.http.callers import caller_scope
from celery_idempotent.django.http.messages import problem, refusal
from celery_idempotent.django.http.options import KEY_META, HttpOptions, http_options
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.outbox import SENDER_OPTIONS, absolute
from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.django.transactions import first_on_commit
from celery_idempotent.errors import STORE_ERRORS, InvalidOption
from celery_idempotent.events import Line
from celery_idempotent.http.describing import describe, failure_of
from celery_idempotent.http.keys import http_identity, read_key
from celery_idempotent.http.problems import RETRY_AFTER, RequestRefused
from celery_idempotent.http.responses import REPLAYED
from celery_idempotent.keys.stamp import KEEP_FAILURE_HEADER, Identified
from celery_idempotent.records import (
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
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from django.http import HttpRequest
    from typing_extensions import Unpack

    from celery_idempotent.celery.definition import Definition
    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.events import Details

logger = logging.getLogger(__name__)


ErrorStatus = Mapping[type[BaseException], int]

#: Options of ``apply_async`` that ``enqueue()`` sets itself: its caller may not.
_SET_BY_ENQUEUE = ("task_id", "idempotency_key", "idempotency_scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request that ``task`` is to carry out.

    ``publish_options`` are those of ``apply_async``; ``url``: where the client finds the status, if anywhere.
    ``error_status``: the HTTP status of the answer about a task that failed with one of these exceptions.
    """

    task: IdempotentTask
    definition: Definition
    args: Sequence[object]
    kwargs: Mapping[str, object]
    publish_options: Options
    key: str
    scope: object
    identified: Identified
    options: HttpOptions
    using: str | None
    url: str | None
    error_status: ErrorStatus

    @property
    def store(self) -> Store:
        """Where the record is."""
        return get_store(self.task.app)

    def report(
        self,
        outcome: signals.OutcomeSignal,
        record: Record | None = None,
        **details: Unpack[Details],
    ) -> None:
        """Report what became of the request, with the task id of the record that its key has."""
        identity, task_id = self.identified.identity, "" if record is None else record.task_id
        self.definition.reporter.report(outcome, identity, task_id, record, **details)

    @property
    def eager(self) -> bool:
        """Does the task run at once, here?"""
        return bool(self.task.app.conf.task_always_eager)

    @property
    def outbox_alias(self) -> str | None:
        """The alias of the database whose outbox takes the message; ``None``: the message is sent without an outbox.

        It is the database of the store, if that is also the one whose COMMIT the message waits for.
        """
        alias = self.store.outbox_alias
        if alias is None or alias != (self.using or DEFAULT_DB_ALIAS) or self.eager:
            return None
        return alias

    @property
    def lost_after_ms(self) -> int:
        """In how many milliseconds the message, sent now, counts as lost: a minute after its ETA."""
        return lost_after_ms(self.publish_options)

    def message(self, task_id: str) -> bytes | None:
        """Return the message that a sweep publishes if this process does not; ``None`` if the record has none.

        It has none if the task runs eagerly, if the call cannot be serialized, or if the retention is 0: a second copy
        of the message might then find no record of the first, and run again.
        """
        if self.eager or not self.definition.policy.retention_ms:
            return None
        given = {"expires": self.task.expires, **self.publish_options}
        options = absolute(
            {name: value for name, value in given.items() if name not in SENDER_OPTIONS},
            task=str(self.task.name),
        )
        options["task_id"] = task_id
        stamp_call(self.definition, self.args, self.kwargs, options)
        again = self.task.signature(tuple(self.args), dict(self.kwargs), options=options)
        return self.definition.codec.dump_message(again)

    def as_now(self) -> QueuedRequest:
        """Return the same with copies of the arguments: the view may change them before the COMMIT."""
        args, kwargs = copied(self.args, self.kwargs) or (self.args, self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    def send(self, task_id: str) -> None:
        """Publish the message now."""
        self.task.apply_async(self.args, self.kwargs, **self.publish_options, task_id=task_id)

    def stage(self, task_id: str, alias: str) -> None:
        """Put the message into the outbox of a database, which publishes it after the COMMIT."""
        # Imported late: its tables are there only where the app is installed.
        from celery_idempotent.django import outbox

        options = {**self.publish_options, "task_id": task_id}
        outbox.stage(self.task, self.args, self.kwargs, options, using=alias)


def read_request(
    request: HttpRequest,
    task: AnyTask,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    scope: object,
    using: str | None,
    error_status: ErrorStatus,
    publish_options: Options,
    options: HttpOptions,
) -> QueuedRequest | Options:
    """Return what a task is to carry out. For one that is switched off or observed: the options of its message.

    Raises:
        RequestRefused: if its key or its caller is not known, or its body is not whole.
        InvalidKey: if an argument has no canonical form.
        InvalidOption: for an option of the message that ``enqueue()`` sets itself, or a bad ``error_status``.
    """
    if chosen := [name for name in _SET_BY_ENQUEUE if name in publish_options]:
        raise InvalidOption(
            f"enqueue() takes no {', '.join(chosen)}: the key is the request's, the scope is given as scope=…, and the "
            "task id belongs to the key."
        )
    task = cast("IdempotentTask", task)
    definition = task.idempotency_definition()
    if definition is None:
        return publish_options
    _check_statuses(error_status, definition)
    # A Request of Django REST framework wraps Django's.
    plain = getattr(request, "_request", request)
    try:
        key = read_key(plain.META.get(KEY_META), required=options.required) or str(uuid.uuid4())
        receive(plain, options)
        if callable(scope):
            scope = scope(request)
        if scope is None:
            scope = caller_scope(request, options)
        # The identity that identify() returns, too; but this refuses a key or scope that the client must not send.
        identity = http_identity(definition.identifier.namespace, scope, key)
    except RequestRefused as refused:
        if definition.policy.mode != "observe":
            raise
        logger.warning(
            "idempotency: observed: a request to task %s would have been refused: %s",
            task.name,
            refused.code,
        )
        return publish_options
    if definition.policy.mode == "observe":
        return {**publish_options, "idempotency_key": key, "idempotency_scope": scope}
    return QueuedRequest(
        task=task,
        definition=definition,
        args=args,
        kwargs=kwargs,
        publish_options={
            **publish_options,
            "headers": {**(publish_options.get("headers") or {}), KEEP_FAILURE_HEADER: True},
            "idempotency_key": key,
            "idempotency_scope": scope,
        },
        key=key,
        scope=scope,
        identified=definition.identifier.identify(args, kwargs, task_id="", key=key, scope=scope),
        options=options,
        using=using,
        error_status=error_status,
        url=_url(request, task, identity, key),
    )


def _check_statuses(error_status: ErrorStatus, definition: Definition) -> None:
    permanent = definition.policy.permanent_errors
    for error, status in error_status.items():
        # A repetition runs the task anew after any other error.
        if not issubclass(error, permanent):
            raise InvalidOption(
                f"error_status of enqueue(): {error.__name__} is not in idempotency_permanent_errors of task "
                f"{definition.identifier.task_name}, so that no answer about it is stored. Add it there."
            )
        if status not in range(400, 600):
            raise InvalidOption(
                f"error_status of enqueue() must be statuses from 400 to 599; {error.__name__} has {status!r}."
            )


def _url(request: HttpRequest, task: IdempotentTask, identity: Identity, key: str) -> str | None:
    """Return the path of the status, ``None`` if the status resource would not find this record for the caller.

    That resource knows the setting ``IDEMPOTENCY_HTTP`` alone; this view may have another scope, its task another app.
    """
    if celery_app() is not task.app:
        return None
    try:
        shown = http_identity(identity.namespace, caller_scope(request, http_options()), key)
    except RequestRefused:
        return None
    return status_url(identity.namespace, key) if shown == identity else None


T = TypeVar("T")

#: The deadline of a reservation whose transaction may still be rolled back: after a ROLLBACK the key is free then.
UNCOMMITTED_MS = 2_000

#: How long a request tries to reach the store, or waits for another request's COMMIT, in seconds.
REQUEST_RETRY_SECONDS = 3.0

#: The answer whenever something broke: the message may have been sent, and only the reply was lost.
_UNSURE = (
    "It may be queued or not. Send the same request with the same key again: it takes effect once."
)

_FORGOTTEN = Line(
    logging.INFO, "%(identity)s failed, and is reserved anew by a request that tries it again"
)


def reserve_key(queued: QueuedRequest, task_id: str, *, uncommitted: bool) -> Reservation:
    """Reserve the key: with its message, until that counts as lost; ``uncommitted``: without it, for a short time.

    Raises:
        RequestRefused: if the store does not answer.
    """
    message = None if uncommitted else queued.message(task_id)
    return _with_retries(
        queued,
        lambda: queued.store.reserve(
            ReserveRequest(
                identity=queued.identified.identity,
                fingerprint=queued.identified.fingerprint,
                task_id=task_id,
                deadline_ms=UNCOMMITTED_MS if uncommitted else queued.lost_after_ms,
                keep_ms=queued.definition.policy.keep_ms,
                message=message,
                uncommitted=uncommitted,
            )
        ),
    )


def forget_failure(queued: QueuedRequest, record: Record) -> None:
    """Delete a FAILED record that the request tries again; the record of a later attempt stays."""
    identity = record.identity
    if _with_retries(
        queued, lambda: queued.store.forget(identity, token=record.token, state=record.state)
    ):
        queued.report(signals.forgotten, record, line=_FORGOTTEN)


def _with_retries(queued: QueuedRequest, verb: Callable[[], T]) -> T:
    """Ask the store, for a few seconds: each verb may be repeated after an answer that was lost."""
    try:
        return backoff.persist(verb, until=time.monotonic() + REQUEST_RETRY_SECONDS)
    except STORE_ERRORS as error:
        queued.report(signals.store_failed, error=error)
        raise RequestRefused("store_unavailable", _UNSURE) from error


def queue_message(queued: QueuedRequest, record: Record, *, in_transaction: bool) -> None:
    """Send the message, now or after the COMMIT.

    Raises:
        RequestRefused: if the broker, or the database of the outbox, does not take it.
    """
    try:
        if in_transaction:
            _stage_message(queued, record)
        elif queued.outbox_alias is None:
            queued.send(record.task_id)
            queued.report(signals.reserved, record, state=State.QUEUED)
        else:
            # The outbox has it from the COMMIT on: it is sent now, or by a sweep once the broker is back.
            with transaction.atomic(using=queued.outbox_alias):
                _stage_message(queued, record)
    except BaseException as error:
        release_reservation(queued.store, record)
        # A transaction that is not ours must end with the error of its database.
        if in_transaction or not isinstance(error, (OperationalError, DatabaseError, OSError)):
            raise
        logger.warning("idempotency: %s is not queued: %s", record.identity, type(error).__name__)
        raise RequestRefused("not_queued", _UNSURE) from error


def _stage_message(queued: QueuedRequest, record: Record) -> None:
    if queued.outbox_alias is not None:
        queued.stage(record.task_id, queued.outbox_alias)
    commit = partial(_at_commit, queued.as_now(), record)
    first_on_commit(transaction.get_connection(queued.using), commit)


def _at_commit(queued: QueuedRequest, record: Record) -> None:
    """Send the message, unless an outbox does; the record gets it first, with the usual deadline."""
    try:
        reserve_key(queued, record.task_id, uncommitted=False)
        uncommitted = False
    except RequestRefused:  # the reservation stands, with less time
        uncommitted = True
    try:
        if queued.outbox_alias is None:  # else the outbox sends it
            queued.send(record.task_id)
        queued.report(signals.reserved, record, state=State.QUEUED)
    except Exception:
        logger.exception("idempotency: %s is committed and not queued", record.identity)
        if uncommitted or queued.message(record.task_id) is None:
            # No sweep can send it. A client that polls gets 404, and sends the request again.
            release_reservation(queued.store, record)


def enqueue(
    request: HttpRequest,
    task: AnyTask,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    scope: object = None,
    using: str | None = None,
    error_status: ErrorStatus | None = None,
    **publish_options: object,
) -> HttpResponse:
    """Let ``task`` do the work of ``request``, once for each ``Idempotency-Key``, and return the answer.

    Args:
        request: the request; its ``Idempotency-Key`` is the task's key.
        task: an ``IdempotentTask``. Its fingerprint of the arguments detects another request with the same key.
        args: for the task.
        kwargs: for the task.
        scope: whose key it is: a value, or a function of the request; by default the caller.
        using: the database whose COMMIT the message waits for, inside a transaction; ``"default"`` if not given.
        error_status: HTTP statuses by exception (each in ``idempotency_permanent_errors``): ``{CardDeclined: 402}``.
        publish_options: options of ``apply_async``.

    Raises:
        InvalidKey: if an argument has no canonical form (``idempotency_fingerprint`` says which of them count).
        InvalidOption: for an option of ``apply_async`` that is set here, ``task_id`` for instance, or a bad
            ``error_status``.
        SynchronousOnlyOperation: in a coroutine, which has :func:`aenqueue`.
    """
    _refuse_event_loop()
    options: HttpOptions = getattr(request, "idempotency_options", None) or http_options()
    try:
        in_transaction = transaction.get_connection(using).in_atomic_block
        kwargs = kwargs or {}
        queued = read_request(
            request,
            task,
            args,
            kwargs,
            scope=scope,
            using=using,
            error_status=error_status or {},
            publish_options=publish_options,
            options=options,
        )
        if not isinstance(queued, QueuedRequest):
            if in_transaction:
                args, kwargs = copied(args, kwargs) or (args, kwargs)
            send = partial(cast("IdempotentTask", task).apply_async, args, kwargs, **queued)
            return _send_unguarded(send, using=using, in_transaction=in_transaction)
        found = _reserve_or_find(queued, in_transaction=in_transaction)
        return _answer(queued, found, in_transaction=in_transaction)
    except RequestRefused as refused:
        return refusal(refused, options)


def _send_unguarded(
    send: Callable[[], object], *, using: str | None, in_transaction: bool
) -> HttpResponse:
    """Publish for a task that is switched off, or observed by its worker: each request sends one more message."""
    if in_transaction:
        transaction.on_commit(send, using=using)
    else:
        send()
    return JsonResponse({"state": State.QUEUED.value}, status=202)


#: :func:`enqueue` for coroutines: it runs in the thread of the request, so that the event loop is not blocked.
aenqueue: Callable[..., Awaitable[HttpResponse]] = sync_to_async(enqueue, thread_sensitive=True)


def _refuse_event_loop() -> None:
    if os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SynchronousOnlyOperation(
        "enqueue() asks the store and the broker, and would stop the event loop meanwhile: in a coroutine, "
        "`await aenqueue(...)`."
    )


def _reserve_or_find(queued: QueuedRequest, *, in_transaction: bool) -> Reserved | Held | Settled:
    """Reserve the key, or find the first request's record. ``in_transaction``: this request has a transaction open.

    The store is asked again in three cases:

    - An earlier reservation is past its deadline: it is made anew, under the same task id.
    - The first request has not committed its reservation yet: this one waits for that.
    - The first request failed, and may be tried again: its record is deleted.

    Raises:
        RequestRefused: if the key was used with other content, the store does not answer, or the first request does
            not commit in time.
    """
    task_id = str(uuid.uuid4())
    give_up, attempts = time.monotonic() + REQUEST_RETRY_SECONDS, 0
    while True:
        # The message is sure to be sent only after a COMMIT: of this transaction, or of the one that stages it.
        uncommitted = in_transaction or queued.outbox_alias is not None
        match reserve_key(queued, task_id, uncommitted=uncommitted):
            case Reserved(record) if record.task_id != task_id:
                # That reservation is past its deadline: its process died, or its message waits in a long queue. So a
                # second message must have the same task id: reserve the key again, under that.
                task_id = record.task_id
            case Held(record, _) if _waits_for_commit(queued, record):
                attempts += 1
                if not backoff.pause(attempts, until=give_up, first=0.02):
                    queued.report(signals.conflicted, record)
                    raise RequestRefused(
                        "request_in_progress",
                        "The first request with this key is not committed yet. Ask again later.",
                    )
            case Settled(record, _) if _is_retryable(queued, record):
                # Deletes this failure only: if another request has reserved the key meanwhile, the next round finds
                # that reservation.
                forget_failure(queued, record)
            case Mismatched(record):
                queued.report(signals.mismatched, record)
                raise RequestRefused(
                    "idempotency_key_reused",
                    "It was sent before with other content. A key stands for one intention: use a new one.",
                )
            case found:
                return found


def _answer(
    queued: QueuedRequest, found: Reserved | Held | Settled, *, in_transaction: bool
) -> HttpResponse:
    """Send the message if this request reserved the key, or answer from the record of the first request."""
    match found:
        case Reserved(record):
            queue_message(queued, record, in_transaction=in_transaction)
            return _status_response(queued, record, replayed=False)
        case Settled(record, _) if record.state.is_failure:
            queued.report(signals.replayed, record)
            failure = failure_of(record, queued.task)
            answer = problem(
                failure.code,
                failure.detail,
                status=_status_of(failure.kind, queued.error_status),
                retryable=False,
                docs_url=queued.options.docs_url,
                state=record.state.value,
                error=failure.error,
            )
            answer[REPLAYED] = "true"
            return answer
        case Held(record, _) | Settled(record, _):
            queued.report(signals.replayed, record)
            return _status_response(queued, record, replayed=True)


def _status_of(kind: type[BaseException] | None, error_status: ErrorStatus) -> int | None:
    """Return the status that the view gives this failure; ``None``: the usual one."""
    return next(
        (error_status[each] for each in getattr(kind, "__mro__", ()) if each in error_status), None
    )


def _waits_for_commit(queued: QueuedRequest, record: Record) -> bool:
    """Does this request wait until the first one has committed its reservation? Not in a TestCase: it never commits."""
    return record.uncommitted and not in_testcase(transaction.get_connection(queued.using))


def _is_retryable(queued: QueuedRequest, record: Record) -> bool:
    """Did the first request fail, and not for good? Then this one tries again."""
    return record.state.is_failure and failure_of(record, queued.task).retryable


def _status_response(queued: QueuedRequest, record: Record, *, replayed: bool) -> HttpResponse:
    """Return the answer about an operation that has not failed: 200 once it is done, 202 while it is not."""
    described = describe(record, key=queued.key, task=queued.task, encoder=DjangoJSONEncoder)
    status = 200 if described["settled"] else 202
    body = {**described, "url": queued.url}
    response = JsonResponse(body, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if queued.url:
        response["Location" if status == 202 else "Content-Location"] = queued.url
    if status == 202:
        response["Retry-After"] = str(RETRY_AFTER)
    if replayed:
        response[REPLAYED] = "true"
    return response
