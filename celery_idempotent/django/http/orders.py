"""A request that a task is to carry out: its key, its message, and the ways in which that can be sent."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from django.db import DEFAULT_DB_ALIAS

from celery_idempotent.celery.delivery import copied
from celery_idempotent.celery.publishing import stamp_call
from celery_idempotent.celery.reserving import lost_after_ms
from celery_idempotent.celery.typed import Options
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.bodies import receive
from celery_idempotent.django.http.callers import caller_scope
from celery_idempotent.django.http.options import KEY_META, HttpOptions, http_options
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.outbox.payload import SENDER_OPTIONS, absolute
from celery_idempotent.errors import InvalidOption
from celery_idempotent.http.keys import http_identity, read_key
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.keys.stamp import KEEP_FAILURE_HEADER, Identified
from celery_idempotent.records import Identity, Record
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
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
        self, outcome: Signal, record: Record | None = None, **details: Unpack[Details]
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
