"""``enqueue``: from a request to a task under one key, with the same answer to each repetition.

::

    POST ─ reserve ─┬─ Reserved ──▶ publish, after the COMMIT if there is a transaction ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202; 409 while the first request is not committed
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved again
                    └─ Mismatched ▶ 422

A 202 holds even if this process dies. A reservation is *uncommitted* until its message is sure to be sent: until then
its deadline is near. After that the record, or an outbox, has the message, and a sweep sends it::

    no transaction   reserve (60 s, with the message) ─ send ─ 202
    transaction      reserve (2 s) ─ 202 ─┬─ COMMIT ─ reserve again (60 s, with the message) ─ send
                                          └─ ROLLBACK, or the process dies: the deadline passes, a repetition is queued
    outbox           reserve (2 s), stage the message ─ COMMIT ─ reserve again, as above ─ send, or a sweep sends
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from kombu.exceptions import OperationalError

from celery_idempotent import backoff, signals
from celery_idempotent.celery import publishing
from celery_idempotent.celery.typed import Options
from celery_idempotent.errors import STORE_ERRORS, FingerprintMismatch, InvalidOption
from celery_idempotent.http.answers import (
    REPLAYED,
    UNSURE,
    WAIT,
    Answer,
    RequestRefused,
    json_answer,
    make_problem,
)
from celery_idempotent.http.requests import http_identity
from celery_idempotent.http.status import describe, failure_of
from celery_idempotent.keys.stamp import KEEP_FAILURE_HEADER
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.records import Held, Identity, Record, Reservation, Settled, State
from celery_idempotent.signals import report
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask

logger = logging.getLogger(__name__)

T = TypeVar("T")
ErrorStatus = Mapping[type[BaseException], int]

#: The deadline of a reservation whose transaction may still be rolled back: after a ROLLBACK the key is free then.
UNCOMMITTED_MS = 2_000

#: How long a request tries to reach the store, or waits for another request's COMMIT, in seconds.
REQUEST_RETRY_SECONDS = 3.0


class Order(publishing.ReservedCall):
    """A request that a task is to carry out; a framework's subclass knows its transactions.

    Args:
        read: returns the key and the scope of the request.
        status_url: returns where the caller finds the status, ``None`` for nowhere.

    Raises:
        InvalidOption: for an option of ``apply_async`` that follows from the request, or a bad ``error_status``.
    """

    #: What a broker, or a framework's database, raises while it is away.
    transient: tuple[type[Exception], ...] = (OperationalError, OSError)
    #: The message waits for the COMMIT of a transaction that the caller has open.
    in_transaction = False
    #: An outbox sends the message.
    has_outbox = False
    each_runs = False  # a repetition of the request is no other call
    attempts, give_up = 0, 0.0

    is_sent = False

    task: IdempotentTask
    key: str

    def __init__(
        self,
        task: IdempotentTask,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        read: Callable[[], tuple[str, object]],
        status_url: Callable[[Identity, str], str | None],
        options: Mapping[str, object],
        error_status: ErrorStatus | None,
        docs_url: str | None,
    ) -> None:
        self.task, self.args, self.kwargs = task, args, kwargs
        self.read, self.status_url, self.docs_url = read, status_url, docs_url
        self.options, self.error_status = Options(options), error_status or {}
        definition = task.idempotency_definition()
        self.enforced = definition is not None and definition.policy.mode == "enforce"
        self.name, self.sender = str(task.name), task
        if definition is not None:
            self.definition = definition
        if chosen := options.keys() & {"task_id", "idempotency_key", "idempotency_scope"}:
            raise InvalidOption(
                f"enqueue() takes no {', '.join(sorted(chosen))}: the request has the key, scope=… the scope, "
                "and the task id belongs to the key."
            )
        permanent = definition.policy.permanent_errors if definition is not None else Exception
        for error, status in self.error_status.items():
            # A repetition runs the task anew after any other error.
            if not issubclass(error, permanent) or status not in range(400, 600):
                raise InvalidOption(
                    f"error_status of enqueue(): {error.__name__} is not in idempotency_permanent_errors of task "
                    f"{task.name}, so no response about it is stored, or {status!r} is not a status from 400 to 599."
                )

    # -- the framework's part ------------------------------------------------------------------------------------------

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call a function after the COMMIT of the open transaction, or at once."""
        function()

    def joins_first(self) -> bool:
        """Is the first request in the transaction of this one, so that there is no COMMIT to wait for?"""
        return False

    def queue_or_defer(self, record: Record) -> None:
        """Send the message of a reservation, or see to it that :meth:`committed` does."""
        self.send(record)

    # -- the answer ----------------------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """Return the answer to the request, which is queued then, or was before.

        Raises:
            InvalidKey: if an argument has no canonical form.
        """
        try:
            self.key, scope = self.read()
            http_identity(str(self.task.name), scope, self.key)  # refuses a bad scope
            self.options |= {"idempotency_key": self.key, "idempotency_scope": scope}
            if self.enforced:
                identifier = self.definition.identifier
                identified = identifier.identify(
                    self.args, self.kwargs, task_id="", key=self.key, scope=scope
                )
                self.identity, self.fingerprint = identified.identity, identified.fingerprint
                self.options["headers"] = {
                    **(self.options.get("headers") or {}),
                    KEEP_FAILURE_HEADER: True,
                }
                # It is sure to be sent only after a COMMIT: of the caller's transaction, or of one that stages it.
                self.uncommitted = self.in_transaction or self.has_outbox
                try:
                    return self._answer(*self.reserve_and_send(str(uuid.uuid4())))
                except FingerprintMismatch as mismatch:
                    raise RequestRefused(
                        "idempotency_key_reused",
                        "It was sent before with other content. A key identifies one operation: use a new one.",
                    ) from mismatch
        except RequestRefused as refused:
            if self.enforced:
                return refused.answer(self.docs_url)
        # Of a task that is off or observed each request sends one more message.
        self.on_commit(partial(self.task.apply_async, self.args, self.kwargs, **self.options))
        return json_answer(202, [], {"state": State.QUEUED.value})

    def _answer(self, record: Record, replayed: bool) -> Answer:
        """Return 202 until it is done, 200 with the result, or the error."""
        marks = [(REPLAYED, "true")] if replayed else []
        if record.state is State.FAILED:
            failure = failure_of(record, self.task)
            statuses = map(self.error_status.get, getattr(failure.kind, "__mro__", ()))
            problem = make_problem(
                failure.code,
                failure.detail,
                status=next(filter(None, statuses), None),
                retryable=False,
                docs_url=self.docs_url,
                state=record.state.value,
                error=failure.error,
            )
            return problem._replace(headers=problem.headers + marks)
        told = describe(record, key=self.key, task=self.task)
        told["url"] = url = self.status_url(record.identity, self.key)
        headers = [("Cache-Control", "no-store"), *marks, *(() if told["settled"] else WAIT)]
        if url:
            headers.append(("Content-Location" if told["settled"] else "Location", url))
        return json_answer(200 if told["settled"] else 202, headers, told)

    # -- reserve and send ----------------------------------------------------------------------------------------------

    @cached_property
    def store(self) -> Store:  # type: ignore[override]
        """The store of the task's app."""
        return get_store(self.task.app)

    def deadline_ms(self) -> int:  # noqa: D102  as the base
        return UNCOMMITTED_MS if self.uncommitted else publishing.lost_after_ms(self.options)

    def ask(self, verb: Callable[[], T]) -> T:
        """Ask the store, for a few seconds: each verb may be repeated after an answer that was lost."""
        try:
            return backoff.persist(verb, until=time.monotonic() + REQUEST_RETRY_SECONDS)
        except STORE_ERRORS as error:
            report(self, signals.store_failed, error=error)
            raise RequestRefused("store_unavailable", UNSURE) from error

    def reserve(self, task_id: str, message: bytes | None) -> Reservation:
        """Reserve the key; a reservation that the store carries out later is sent then."""
        try:
            answer = super().reserve(task_id, message)
        except RequestRefused:
            if not self.uncommitted:  # else its deadline is near
                heartbeat.finish_later(partial(self._send_late, task_id))
            raise
        self.task_id = answer.record.task_id
        return answer

    def _send_late(self, task_id: str) -> None:
        found = self.store.get(self.identity)
        is_ours = found is not None and (found.state, found.task_id) == (State.QUEUED, task_id)
        if found is not None and is_ours and not self.is_sent:
            self.send(found)

    def is_answered(self, earlier: Held | Settled) -> bool:  # noqa: D102
        record = earlier.record
        if isinstance(earlier, Held) and record.uncommitted and not self.joins_first():
            self._wait(record)
            return False
        if record.state is State.FAILED and failure_of(record, self.task).retryable:
            # Deletes this end only: if another call has reserved the key meanwhile, the next round finds that.
            forget = partial(self.store.forget, token=record.token, state=record.state)
            if self.ask(partial(forget, record.identity)):
                why = "it failed, and a request tries it again"
                report(self, signals.forgotten, record, reason=why)
            return False
        report(self, signals.replayed, record)
        return True

    def _wait(self, record: Record) -> None:
        self.attempts += 1
        self.give_up = self.give_up or time.monotonic() + REQUEST_RETRY_SECONDS
        if not backoff.pause(self.attempts, until=self.give_up, first=0.02):
            report(self, signals.conflicted, record)
            raise RequestRefused(
                "request_in_progress",
                "The first request with this key is not committed yet. Ask again later.",
            )

    def message(self, task_id: str) -> bytes | None:  # noqa: D102
        call = publishing.DeferredCall(args=self.args, kwargs=self.kwargs, options=self.options)
        return publishing.message_of(self.task, self.definition, call, task_id)

    def queue(self, record: Record) -> None:  # noqa: D102
        try:
            self.queue_or_defer(record)
        except Exception as error:
            # A transaction that is not ours must end with the error of its database.
            if self.in_transaction or not isinstance(error, self.transient):
                raise
            logger.warning(
                "idempotency: %s is not queued: %s", record.identity, type(error).__name__
            )
            raise RequestRefused("not_queued", UNSURE) from error

    def send(self, record: Record) -> None:
        """Send the message now, unless an outbox does."""
        self.is_sent = True
        if not self.has_outbox:
            self.task.apply_async(self.args, self.kwargs, **self.options, task_id=record.task_id)
        report(self, signals.reserved, record, state=State.QUEUED)

    def committed(self, record: Record) -> None:
        """Send the message after the COMMIT; the record gets it first, with the usual deadline."""
        self.uncommitted = False
        with suppress(RequestRefused):  # the reservation stands, with less time
            self.reserve(record.task_id, self.message(record.task_id))
        try:
            self.send(record)
        except Exception:
            # A sweep sends it, or a repetition after the deadline.
            logger.exception("idempotency: %s is committed and not queued", record.identity)
