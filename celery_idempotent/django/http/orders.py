"""What a request asks a task to do: its key, its message, and the ways in which that can be sent."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from django.db import DEFAULT_DB_ALIAS, connections

from celery_idempotent.celery.publishing import stamp_call
from celery_idempotent.celery.reserving import lost_after_ms
from celery_idempotent.celery.typed import Options
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.bodies import receive
from celery_idempotent.django.http.keys import caller_scope, http_identity, read_key
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.problems import RequestRefused
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.outbox.payload import MEANS, absolute
from celery_idempotent.django.sql.autocommit import commits_by_hand
from celery_idempotent.errors import InvalidOption
from celery_idempotent.identity.identified import Identified
from celery_idempotent.identity.stamp import KEEP_FAILURE_HEADER
from celery_idempotent.records import Identity, Record
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
    from django.http import HttpRequest
    from typing_extensions import Unpack

    from celery_idempotent.celery.definition import Definition
    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.protocol.telling import Details

#: What ``enqueue()`` itself says about a message.
_CHOSEN_HERE = ("task_id", "idempotency_key", "idempotency_scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """What is to be done, and how to say so.

    ``publish`` are options of ``apply_async``; ``url``: where the caller finds the status, if anywhere.
    """

    task: IdempotentTask
    definition: Definition
    args: Sequence[object]
    kwargs: Mapping[str, object]
    publish: Options
    key: str
    scope: object
    identified: Identified
    options: HttpOptions
    using: str | None
    url: str | None

    @property
    def store(self) -> Store:
        """Where the record is."""
        return get_store(self.task.app)

    def report(
        self, outcome: Signal, record: Record | None = None, **details: Unpack[Details]
    ) -> None:
        """Report what became of the request: under the id of the task that its key has."""
        identity, task_id = self.identified.identity, "" if record is None else record.task_id
        self.definition.runner.reporter.report(outcome, identity, task_id, record, **details)

    @property
    def eager(self) -> bool:
        """Does the task run at once, here?"""
        return bool(self.task.app.conf.task_always_eager)

    @property
    def outbox(self) -> str | None:
        """The database whose outbox takes the message: the store's, if that is also the one of the transaction."""
        alias = self.store.outbox_alias
        if alias is None or alias != (self.using or DEFAULT_DB_ALIAS) or self.eager:
            return None
        # What is staged is to be committed with this request's own work, or at once.
        return None if commits_by_hand(connections[alias]) else alias

    @property
    def lost_after_ms(self) -> int:
        """In how many milliseconds the message, sent now, counts as lost: a minute after its ETA."""
        return lost_after_ms(self.publish)

    def message(self, task_id: str) -> bytes | None:
        """Return what a sweep publishes if this process does not, ``None`` where that is not for the record.

        An outbox has a message of its own. Without retention a second copy may find no trace of the first.
        """
        if self.eager or self.outbox is not None or not self.definition.policy.retention_ms:
            return None
        given = {"expires": self.task.expires, **self.publish}
        options = absolute(
            {name: value for name, value in given.items() if name not in MEANS},
            task=str(self.task.name),
        )
        options["task_id"] = task_id
        stamp_call(self.definition, self.args, self.kwargs, options)
        again = self.task.signature(tuple(self.args), dict(self.kwargs), options=options)
        return self.definition.codec.dump_message(again)

    def send(self, task_id: str) -> None:
        """Publish."""
        self.task.apply_async(self.args, self.kwargs, **self.publish, task_id=task_id)

    def stage(self, task_id: str, alias: str) -> None:
        """Let the outbox of a database publish."""
        # Imported late: its tables are there only where the app is installed.
        from celery_idempotent.django import outbox

        publish = {**self.publish, "task_id": task_id}
        outbox.stage(self.task, self.args, self.kwargs, publish, using=alias)


def read_order(
    request: HttpRequest,
    task: AnyTask,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    scope: object,
    using: str | None,
    publish: Options,
    options: HttpOptions,
) -> TaskOrder | None:
    """Return what a request asks for, ``None`` if the task is switched off (``idempotency_mode="off"``).

    Raises:
        RequestRefused: if its key or its caller is not known, or its body is not whole.
        InvalidOption: for an option of the message that is not the caller's to choose.
    """
    if chosen := [name for name in _CHOSEN_HERE if name in publish]:
        raise InvalidOption(
            f"enqueue() takes no {', '.join(chosen)}: the key is the request's, the scope is given as scope=…, and the "
            "task id belongs to the key."
        )
    plain = getattr(request, "_request", request)
    key = read_key(plain, strict=options.strict, required=options.required) or str(uuid.uuid4())
    receive(plain, options, parsed=True)
    if callable(scope):
        scope = scope(request)
    if scope is None:
        scope = caller_scope(request, options)
    task = cast("IdempotentTask", task)
    definition = task.idempotency_definition()
    if definition is None:
        return None
    namespace = definition.identifier.namespace
    identity = http_identity(namespace, scope, key)
    return TaskOrder(
        task=task,
        definition=definition,
        args=args,
        kwargs=kwargs,
        publish={
            **publish,
            "headers": {**(publish.get("headers") or {}), KEEP_FAILURE_HEADER: True},
            "idempotency_key": key,
            "idempotency_scope": scope,
        },
        key=key,
        scope=scope,
        identified=definition.identifier.identify(args, kwargs, task_id="", key=key, scope=scope),
        options=options,
        using=using,
        url=_url(request, task, identity, key),
    )


def _url(request: HttpRequest, task: IdempotentTask, identity: Identity, key: str) -> str | None:
    """Return where the status is, if the resource, which knows the setting alone, finds this record for the caller."""
    general = http_options()
    if celery_app(general.app) is not task.app or not general.shows(identity.namespace):
        return None
    try:
        shown = http_identity(identity.namespace, caller_scope(request, general), key)
    except RequestRefused:
        return None
    return status_url(identity.namespace, key) if shown == identity else None
