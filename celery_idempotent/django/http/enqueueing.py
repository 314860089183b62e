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

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.utils.asyncio import async_unsafe
from kombu.exceptions import OperationalError

from celery_idempotent import backoff, signals
from celery_idempotent.celery.delivery import copied
from celery_idempotent.celery.publishing import lost_after_ms, release_reservation, stamp_call
from celery_idempotent.celery.typed import Options
from celery_idempotent.django import outbox
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import KEY_META, caller_scope, http_options, receive
from celery_idempotent.django.http.responses import response_of
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.transactions import first_on_commit, in_testcase
from celery_idempotent.errors import STORE_ERRORS, InvalidOption
from celery_idempotent.events import Line
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.keys import http_identity, read_key
from celery_idempotent.http.status import ErrorStatus, failure_of, operation_answer
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
    from django.http import HttpRequest, HttpResponse
    from typing_extensions import Unpack

    from celery_idempotent.celery.definition import Definition
    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.events import Details
    from celery_idempotent.http.options import HttpOptions
    from celery_idempotent.signals import OutcomeSignal

logger = logging.getLogger(__name__)

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
    logging.INFO, "{event.identity} failed, and is reserved anew by a request that tries it again"
)

#: Options of ``apply_async`` that ``enqueue()`` sets itself: its caller may not.
_SET_BY_ENQUEUE = ("task_id", "idempotency_key", "idempotency_scope")


@async_unsafe(
    "enqueue() asks the store and the broker, and would stop the event loop meanwhile: in a coroutine, "
    "`await aenqueue(...)`."
)
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
    if chosen := [name for name in _SET_BY_ENQUEUE if name in publish_options]:
        raise InvalidOption(
            f"enqueue() takes no {', '.join(chosen)}: the key is the request's, the scope is given as scope=…, and the "
            "task id belongs to the key."
        )
    options: HttpOptions = getattr(request, "idempotency_options", None) or http_options()
    task, kwargs = cast("IdempotentTask", task), kwargs or {}
    in_transaction = transaction.get_connection(using).in_atomic_block
    if in_transaction:  # the view may change them before the COMMIT
        args, kwargs = copied(args, kwargs)
    definition = task.idempotency_definition()
    mode, about, given = "off", Options(), Options(publish_options)
    try:
        if definition is not None:
            mode = definition.policy.mode
            _check_statuses(error_status or {}, definition)
            about = _read_key(request, options, definition, scope)
    except RequestRefused as refused:
        if mode == "enforce":
            return response_of(refused.answer(options.docs_url))
        logger.warning(
            "idempotency: observed: a request to task %s would have been refused: %s",
            task.name,
            refused.code,
        )
    given |= {f"idempotency_{name}": each for name, each in about.items()}
    if definition is None or mode == "observe":  # each request sends one more message
        send = partial(task.apply_async, args, kwargs, **given)
        if in_transaction:
            transaction.on_commit(send, using=using)
        else:
            send()
        return response_of(Answer(202, [], {"state": State.QUEUED.value}))
    given["headers"] = {**(given.get("headers") or {}), KEEP_FAILURE_HEADER: True}
    identified = definition.identifier.identify(args, kwargs, task_id="", **about)
    order = _Order(
        task=task,
        definition=definition,
        args=args,
        kwargs=kwargs,
        options=given,
        identified=identified,
        store=get_store(task.app),
        using=using,
        in_transaction=in_transaction,
    )
    try:
        record, replayed = order.place()
        answer = operation_answer(
            record,
            key=about["key"],
            task=task,
            url=_url(request, task, identified.identity, about["key"]),
            replayed=replayed,
            error_status=error_status or {},
            docs_url=options.docs_url,
            encoder=DjangoJSONEncoder,
        )
    except RequestRefused as refused:
        answer = refused.answer(options.docs_url)
    return response_of(answer)


#: :func:`enqueue` for coroutines: it runs in the thread of the request, so that the event loop is not blocked.
aenqueue: Callable[..., Awaitable[HttpResponse]] = sync_to_async(enqueue)


def _check_statuses(error_status: ErrorStatus, definition: Definition) -> None:
    for error, status in error_status.items():
        # A repetition runs the task anew after any other error.
        if not issubclass(error, definition.policy.permanent_errors):
            raise InvalidOption(
                f"error_status of enqueue(): {error.__name__} is not in idempotency_permanent_errors of task "
                f"{definition.name}, so that no answer about it is stored. Add it there."
            )
        if status not in range(400, 600):
            raise InvalidOption(
                f"error_status of enqueue() must be statuses from 400 to 599; {error.__name__} has {status!r}."
            )


def _read_key(
    request: HttpRequest, options: HttpOptions, definition: Definition, scope: object
) -> Options:
    """Return the ``key`` and the ``scope`` of a request.

    Raises:
        RequestRefused: if its key or its caller is not known, or its body is not whole.
    """
    plain = getattr(request, "_request", request)
    key = read_key(plain.META.get(KEY_META), required=options.required) or str(uuid.uuid4())
    receive(plain, options)
    whose = scope(request) if callable(scope) else scope
    if whose is None:
        whose = caller_scope(request, options)
    http_identity(definition.identifier.namespace, whose, key)  # refuses a scope that cannot be one
    return {"key": key, "scope": whose}


def _url(request: HttpRequest, task: IdempotentTask, identity: Identity, key: str) -> str | None:
    """Return the path of the status, ``None`` if the status resource would not find this record for the caller.

    That resource knows the setting ``IDEMPOTENCY_HTTP`` alone; this view may have another scope, its task another app.
    """
    try:
        scope = caller_scope(request, http_options())
        found = celery_app() is task.app and http_identity(identity.namespace, scope, key)
    except RequestRefused:
        return None
    return status_url(identity.namespace, key) if found == identity else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A request that ``task`` is to carry out; ``options`` are those of ``apply_async``."""

    task: IdempotentTask
    definition: Definition
    args: Sequence[object]
    kwargs: Mapping[str, object]
    options: Options
    identified: Identified
    store: Store
    using: str | None
    in_transaction: bool

    @property
    def outbox(self) -> str | None:
        """The alias of the database whose outbox takes the message; ``None``: the message is sent without an outbox.

        It is the database of the store, if that is also the one whose COMMIT the message waits for.
        """
        alias = self.store.outbox_alias
        is_eager = self.task.app.conf.task_always_eager
        return None if is_eager or alias != (self.using or DEFAULT_DB_ALIAS) else alias

    def place(self) -> tuple[Record, bool]:
        """Reserve the key and send the message, or find the first request's record; return it, and whether it is that.

        The store is asked again in three cases:

        - An earlier reservation is past its deadline: it is made anew, under the same task id.
        - The first request has not committed its reservation yet: this one waits for that.
        - The first request failed, and may be tried again: its record is deleted.

        Raises:
            RequestRefused: if the key was used with other content, the store does not answer, or the first request does
                not commit in time.
        """
        task_id = str(uuid.uuid4())
        # The message is sure to be sent only after a COMMIT: of this transaction, or of the one that stages it.
        uncommitted = self.in_transaction or self.outbox is not None
        give_up, attempts = time.monotonic() + REQUEST_RETRY_SECONDS, 0
        while True:
            message = None if uncommitted else self._message(task_id)
            match self._reserve(task_id, message, uncommitted=uncommitted):
                case Reserved(record) if record.task_id != task_id:
                    # That reservation is past its deadline: its process died, or its message waits in a long queue. So
                    # a second message must have the same task id: reserve the key again, under that.
                    task_id = record.task_id
                case Reserved(record):
                    self._queue(record, uncommitted=uncommitted)
                    return record, False
                case Held(record, _) if record.uncommitted and not self._never_commits():
                    attempts += 1
                    if not backoff.pause(attempts, until=give_up, first=0.02):
                        self._report(signals.conflicted, record)
                        raise RequestRefused(
                            "request_in_progress",
                            "The first request with this key is not committed yet. Ask again later.",
                        )
                case Settled(record, _) if self._is_retryable(record):
                    # Deletes this failure only: if another request has reserved the key meanwhile, the next round finds
                    # that reservation.
                    forget = partial(
                        self.store.forget, record.identity, token=record.token, state=record.state
                    )
                    if self._persist(forget):
                        self._report(signals.forgotten, record, line=_FORGOTTEN)
                case Mismatched(record):
                    self._report(signals.mismatched, record)
                    raise RequestRefused(
                        "idempotency_key_reused",
                        "It was sent before with other content. A key stands for one intention: use a new one.",
                    )
                case Held(record, _) | Settled(record, _):
                    self._report(signals.replayed, record)
                    return record, True

    def _never_commits(self) -> bool:
        """Is the first request in the transaction of a ``TestCase``, as this one is?"""
        return in_testcase(transaction.get_connection(self.using))

    def _is_retryable(self, record: Record) -> bool:
        """Did the first request fail, and not for good? Then this one tries again."""
        return record.state is State.FAILED and failure_of(record, self.task).retryable

    def _reserve(self, task_id: str, message: bytes | None, *, uncommitted: bool) -> Reservation:
        """Reserve the key: with its message, until that is lost; ``uncommitted``: for a short time."""
        request = ReserveRequest(
            identity=self.identified.identity,
            fingerprint=self.identified.fingerprint,
            task_id=task_id,
            deadline_ms=UNCOMMITTED_MS if uncommitted else lost_after_ms(self.options),
            keep_ms=self.definition.policy.keep_ms,
            message=message,
            uncommitted=uncommitted,
        )
        return self._persist(lambda: self.store.reserve(request))

    def _persist(self, verb: Callable[[], T]) -> T:
        """Ask the store, for a few seconds: each verb may be repeated after an answer that was lost.

        Raises:
            RequestRefused: if the store does not answer.
        """
        try:
            return backoff.persist(verb, until=time.monotonic() + REQUEST_RETRY_SECONDS)
        except STORE_ERRORS as error:
            self._report(signals.store_failed, error=error)
            raise RequestRefused("store_unavailable", _UNSURE) from error

    def _report(
        self, outcome: OutcomeSignal, record: Record | None = None, **details: Unpack[Details]
    ) -> None:
        """Report what became of the request, with the task id of the record that its key has."""
        identity, task_id = self.identified.identity, "" if record is None else record.task_id
        self.definition.reporter.report(outcome, identity, task_id, record, **details)

    def _message(self, task_id: str) -> bytes | None:
        """Return the message that a sweep publishes if this process does not; ``None`` if the record has none.

        It has none if the task runs eagerly, if the call cannot be serialized, or if the retention is 0: a second copy
        of the message might then find no record of the first, and run again.
        """
        if self.task.app.conf.task_always_eager or not self.definition.policy.retention_ms:
            return None
        given = {"expires": self.task.expires, **self.options}
        options = outbox.absolute(
            {name: value for name, value in given.items() if name not in outbox.SENDER_OPTIONS},
            task=str(self.task.name),
        )
        options["task_id"] = task_id
        stamp_call(self.definition, self.args, self.kwargs, options)
        again = self.task.signature(tuple(self.args), dict(self.kwargs), options=options)
        return self.definition.codec.dump_message(again)

    def _queue(self, record: Record, *, uncommitted: bool) -> None:
        """Send the message, now or after the COMMIT.

        Raises:
            RequestRefused: if the broker, or the database of the outbox, does not take it.
        """
        own = None if self.in_transaction else self.outbox
        try:
            with nullcontext() if own is None else transaction.atomic(using=own):
                if self.outbox is not None:
                    # The outbox has it from the COMMIT on: it is sent then, or by a sweep once the broker is back.
                    options = {**self.options, "task_id": record.task_id}
                    outbox.stage(self.task, self.args, self.kwargs, options, using=self.outbox)
                if uncommitted:
                    connection = transaction.get_connection(self.using)
                    first_on_commit(connection, partial(self._at_commit, record))
                else:
                    self._send(record)
        except BaseException as error:
            release_reservation(self.store, record)
            # A transaction that is not ours must end with the error of its database.
            transient = (OperationalError, DatabaseError, OSError)
            if self.in_transaction or not isinstance(error, transient):
                raise
            logger.warning(
                "idempotency: %s is not queued: %s", record.identity, type(error).__name__
            )
            raise RequestRefused("not_queued", _UNSURE) from error

    def _send(self, record: Record) -> None:
        if self.outbox is None:  # else the outbox sends it
            self.task.apply_async(self.args, self.kwargs, **self.options, task_id=record.task_id)
        self._report(signals.reserved, record, state=State.QUEUED)

    def _at_commit(self, record: Record) -> None:
        """Send the message, unless an outbox does; the record gets it first, with the usual deadline."""
        message = self._message(record.task_id)
        try:
            self._reserve(record.task_id, message, uncommitted=False)
        except RequestRefused:  # the reservation stands, with less time
            message = None
        try:
            self._send(record)
        except Exception:
            logger.exception("idempotency: %s is committed and not queued", record.identity)
            if message is None:
                # No sweep can send it. A client that polls gets 404, and sends the request again.
                release_reservation(self.store, record)
