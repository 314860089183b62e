"""What happens to a call on its way to the broker: its stamp, its reservation, the ids of its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.utils import uuid

from celery_idempotent import delivery, signals
from celery_idempotent.claim import Claim, current_claim
from celery_idempotent.definition import Definition
from celery_idempotent.errors import FingerprintMismatch, IdempotencyError
from celery_idempotent.hooks import (
    KEY_HEADER,
    SCOPE_HEADER,
    STAMP_HEADER,
    as_mapping,
    own_id,
    stamp,
    stamp_of,
)
from celery_idempotent.keys import Identified
from celery_idempotent.records import Held, Mismatched, Reserved, Settled, State
from celery_idempotent.signals import Event, emit
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery_idempotent.task import IdempotentTask

__all__ = ["identify", "publish"]

logger = logging.getLogger(__name__)

#: A reservation whose message did not start in time (after its ETA, if it has one) counts as lost.
RESERVED_MS = 60_000

#: Options of a call that somebody waits for by its own id, or that has something to send on.
_CANVAS = ("chord", "chain", "group_id", "group_index", "link", "link_error")


def publish(
    task: IdempotentTask,
    definition: Definition,
    send: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Publish one call through ``send(args, kwargs, **options)``, ``options`` being all of ``apply_async``'s.

    Raises:
        InvalidKey: if the key or scope cannot be used, or is missing where one is required.
        FingerprintMismatch: if the key was reserved or used with other arguments (``idempotency_publish_once``).
    """
    given_id = options.get("task_id")
    retried = _retried(task, definition, options)
    identified = identify(definition, args, kwargs, options, retried)
    for kind in ("link", "link_error"):
        if options.get(kind):
            options["task_id"] = options.get("task_id") or uuid()
            options[kind] = delivery.derive_ids(task.app, options[kind], options["task_id"], kind)
    if retried is not None:
        # Before the retry is on its way, so that it never meets its predecessor's claim.
        definition.runner.release(retried, requeue_ms=_until_lost(options))
    elif (
        definition.policy.publish_once
        and identified is not None
        and not identified.by_task_id
        and given_id is None
        and not task.app.conf.task_always_eager
        and not any(options.get(name) is not None for name in _CANVAS)
    ):
        return _once(task, definition, identified, lambda: send(args, kwargs, **options), options)
    return send(args, kwargs, **options)


def identify(
    definition: Definition,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    retried: Claim | None = None,
    *,
    eager: bool = False,
) -> Identified | None:
    """Put the stamp into the headers in ``options``, and with it the task id, and return what was stamped now.

    A message that was stamped before (a retry, a copy that comes back) keeps its stamp, whatever its arguments.
    """
    headers = as_mapping(options.get("headers"))
    task_id = options.get("task_id")
    kept = options.get("stamped_headers") or ()  # Celery's stamps are options, too, and stay
    key, scope = (
        options.get(name) if name in kept else options.pop(name, None)
        for name in (KEY_HEADER, SCOPE_HEADER)
    )
    explicit = (key is not None and KEY_HEADER not in kept) or (
        scope is not None and SCOPE_HEADER not in kept
    )
    if stamp_of(headers, task_id) is not None and not explicit:
        return None
    if retried is not None and not explicit:
        identified = Identified(retried.record.identity, retried.record.fingerprint)
    else:
        key = headers.get(KEY_HEADER) if key is None else key
        scope = headers.get(SCOPE_HEADER) if scope is None else scope
        if key is None and scope is None and not definition.keyed:
            if definition.identifier.require_key:
                definition.identifier.identify(args, kwargs, task_id="")  # raises
            return None
        task_id = options["task_id"] = task_id or uuid()
        identified = definition.identifier.identify(
            args,
            kwargs,
            task_id=uuid() if eager else own_id(headers, task_id),
            nesting=options.get("replaced_task_nesting") or 0,
            key=key,
            scope=scope,
        )
    options["headers"] = {**headers, STAMP_HEADER: stamp(identified, str(task_id))}
    return identified


def _retried(
    task: IdempotentTask, definition: Definition, options: Mapping[str, Any]
) -> Claim | None:
    """Return the claim of the run that publishes its own retry with this call."""
    claim = current_claim()
    if (
        claim is None
        or claim.record.task_id != options.get("task_id")
        or claim.record.identity.namespace != definition.identifier.namespace
        or (options.get("retries") or 0) <= (task.request.retries or 0)
    ):
        return None
    return claim


def _once(
    task: IdempotentTask,
    definition: Definition,
    identified: Identified,
    send: Callable[[], Any],
    options: dict[str, Any],
) -> Any:
    """Publish if this key was not published before; else return the first task's result.

    Should the producer die between the reservation and the publishing, the reservation's deadline passes, and the
    next call publishes under the same task id.
    """
    store = get_store(task.app)
    try:
        answer = store.reserve(
            identified.identity,
            task_id=options["task_id"],
            deadline_ms=_until_lost(options),
            keep_ms=definition.policy.keep_ms,
            fingerprint=identified.fingerprint,
        )
    except IdempotencyError as error:
        # The claim still guards the run: one message too many harms nobody.
        logger.warning("idempotency: %s is published unreserved: %s", task.name, error)
        emit(signals.store_failed, task, _event(task, identified, options["task_id"], error))
        return send()
    match answer:
        case Held(record, _):
            return task.AsyncResult(record.task_id)
        case Settled(record, _):
            if record.state is State.COMPLETED:
                return task.AsyncResult(record.task_id)
            return send()
        case Mismatched(record):
            raise FingerprintMismatch(
                f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a key "
                "stands "
                "for one intention."
            )
        case Reserved(record):
            if record.task_id != options["task_id"]:
                options["task_id"] = record.task_id
                options["headers"][STAMP_HEADER] = stamp(identified, record.task_id)
            try:
                sent = send()
            except BaseException:
                try:
                    store.release(identified.identity, token=record.token)
                except IdempotencyError as error:
                    logger.warning("idempotency: a reservation is left to its deadline: %s", error)
                raise
            emit(signals.reserved, task, _event(task, identified, record.task_id, None))
            return sent


def _event(
    task: IdempotentTask, identified: Identified, task_id: str, error: Exception | None
) -> Event:
    return Event(task=str(task.name), task_id=task_id, identity=identified.identity, error=error)


def _until_lost(options: Mapping[str, Any]) -> int:
    """Return in how many milliseconds a message that is published now counts as lost."""
    wait = 0.0
    eta = options.get("eta")
    if options.get("countdown"):
        wait = float(options["countdown"])
    elif isinstance(eta, datetime):
        now = datetime.now(timezone.utc)
        wait = ((eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)) - now).total_seconds()
    return RESERVED_MS + max(int(wait * 1000), 0)
