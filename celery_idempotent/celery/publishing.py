"""What happens to a call on its way to the broker: its stamp, its reservation, the ids of its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Reject
from celery.utils import uuid

from celery_idempotent import signals
from celery_idempotent.celery import delivery
from celery_idempotent.celery.definition import Definition
from celery_idempotent.errors import FingerprintMismatch, IdempotencyError
from celery_idempotent.identity.identified import Identified
from celery_idempotent.identity.stamp import (
    KEY_HEADER,
    RAW_KEY,
    RAW_SCOPE,
    SCOPE_HEADER,
    as_mapping,
    message_id,
    read_stamp,
    stamp_of,
    with_stamp,
)
from celery_idempotent.protocol import key_change
from celery_idempotent.protocol.claim import Claim, current_claim
from celery_idempotent.protocol.telling import Line
from celery_idempotent.records import Held, Mismatched, Reserved, Settled, State
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import forget_mark

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask

__all__ = [
    "Kept",
    "drop_key",
    "identify",
    "keeper",
    "publish",
    "send_kept",
    "take_keeper",
    "until_lost",
]

logger = logging.getLogger(__name__)

_PUBLISHED_BEFORE = Line(
    logging.DEBUG, "%(task)s is not published again: %(identity)s belongs to task %(first)s"
)
_UNRESERVED = Line(logging.WARNING, "%(task)s is published unreserved: %(error)s")

#: A reservation whose message did not start in time (after its ETA, if it has one) counts as lost.
RESERVED_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A call that is stamped and complete, to be sent later: whenever that is, and how often, the same message.

    ``once``: its key is to be reserved before (``idempotency_publish_once``).
    """

    args: Any
    kwargs: Any
    options: dict[str, Any]
    once: bool = False


#: Takes the next call of a task instead of the broker: the outbox, for the one ``apply_async`` that it makes itself.
keeper: ContextVar[Callable[[IdempotentTask, Kept], Any] | None] = ContextVar(
    "idempotency_keeper", default=None
)

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
    keep = take_keeper()
    given_id = options.get("task_id")
    retried = _retried(task, definition, options)
    identified = identify(definition, args, kwargs, options, retried)
    for kind in ("link", "link_error"):
        if options.get(kind):
            options["task_id"] = options.get("task_id") or uuid()
            options[kind] = delivery.derive_ids(task.app, options[kind], options["task_id"], kind)
    once = (
        definition.policy.publish_once
        and definition.policy.mode == "enforce"
        and retried is None
        and identified is not None
        and not identified.by_task_id
        and given_id is None
        and not task.app.conf.task_always_eager
        and not any(options.get(name) is not None for name in _CANVAS)
    )
    if keep is not None:
        return keep(task, Kept(args=args, kwargs=kwargs, options=options, once=once))
    if retried is not None:
        # Before the retry is on its way, so that it never meets its predecessor's claim.
        free = partial(definition.runner.release, retried, requeue_ms=until_lost(options))
        if retried.transaction is not None:
            retried.afterwards = partial(_retry, free, lambda: send(args, kwargs, **options))
            return task.AsyncResult(options["task_id"])
        free()
    if once and identified is not None:
        return _once(task, definition, identified, lambda: send(args, kwargs, **options), options)
    return send(args, kwargs, **options)


def take_keeper() -> Callable[[IdempotentTask, Kept], Any] | None:
    """Return who keeps this call, if anybody does; the next call is sent again."""
    keep = keeper.get()
    if keep is not None:
        keeper.set(None)
    return keep


def send_kept(
    task: IdempotentTask, definition: Definition | None, send: Callable[..., Any], kept: Kept
) -> Any:
    """Send a call that was kept, as often as it takes: what it is about was stamped on it when it was made."""
    options = dict(kept.options)
    again = partial(send, kept.args, kept.kwargs)
    if not kept.once or definition is None:
        return again(**options)
    task_id = options.get("task_id")
    identified = definition.identifier.stamped(
        stamp_of(as_mapping(options.get("headers")), task_id),
        kept.args,
        kept.kwargs,
        task_id=str(task_id),
    )
    if identified is None:
        return again(**options)
    try:
        return _once(task, definition, identified, lambda: again(**options), options)
    except FingerprintMismatch as error:
        # Whoever made this call is gone: the worker refuses it, where its result is looked for.
        logger.warning("idempotency: %s[%s]: %s", task.name, options.get("task_id"), error)
        return again(**options)


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
    kept = options.get("stamped_headers") or ()
    key = options.get(KEY_HEADER)
    scope = options.get(SCOPE_HEADER)
    drop_key(options)
    explicit = (key is not None and KEY_HEADER not in kept) or (
        scope is not None and SCOPE_HEADER not in kept
    )
    said = read_stamp(headers, task_id)
    if "key" in said and not explicit:
        return None
    if retried is not None and not explicit:
        identified = _identified_of(retried)
    else:
        key = said.get(RAW_KEY) if key is None else key
        scope = said.get(RAW_SCOPE) if scope is None else scope
        if key is None and scope is None and not definition.keyed:
            if definition.identifier.require_key:
                definition.identify(args, kwargs, task_id=task_id or "")  # raises
            return None
        task_id = options["task_id"] = task_id or uuid()
        identified = definition.identify(
            args,
            kwargs,
            task_id=uuid() if eager else message_id(headers, task_id),
            nesting=options.get("replaced_task_nesting") or 0,
            key=key,
            scope=scope,
        )
    options["headers"] = with_stamp(headers, str(task_id), identified)
    return identified


def _identified_of(claim: Claim) -> Identified:
    """Return what a run is about."""
    record, old = claim.record, claim.old
    before = None if old is None else Identified(old.identity, old.fingerprint)
    return Identified(record.identity, record.fingerprint, before)


def drop_key(options: dict[str, Any]) -> None:
    """Take key and scope out of the options of a call; Celery's stamps are options, too, and stay."""
    for name in (KEY_HEADER, SCOPE_HEADER):
        if name not in (options.get("stamped_headers") or ()):
            options.pop(name, None)


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


def _retry(free: Callable[[], object], send: Callable[[], object]) -> None:
    """Publish the retry of a run whose transaction is rolled back by now."""
    free()
    try:
        send()
    except Exception as error:
        raise Reject(error, requeue=False) from error  # as Celery does


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
    identity, task_id = identified.identity, options["task_id"]
    report = partial(definition.runner.reporter.report, store=store)
    reserve = partial(
        key_change.reserve,
        store,
        identified,
        task_id=task_id,
        deadline_ms=until_lost(options),
        keep_ms=definition.policy.keep_ms,
    )
    try:
        while isinstance(answer := reserve(), (Settled, Mismatched)):
            if not definition.policy.forgets(answer.record):
                break
            forget_mark(store, answer.record.identity, token=answer.record.token)
    except IdempotencyError as error:
        # The claim still guards the run: one message too many harms nobody.
        report(signals.store_failed, identity, task_id, error=error, line=_UNRESERVED)
        return send()
    match answer:
        case Held(record, left_ms) if left_ms or record.state is not State.PROCESSING:
            report(signals.replayed, identity, task_id, record, line=_PUBLISHED_BEFORE)
            return task.AsyncResult(record.task_id)
        case Held(record, _):
            # Its worker never came back, and with early acks its message is gone, too.
            _as_task(options, record.task_id)
            return send()
        case Settled(record, _):
            if record.state is State.COMPLETED:
                report(signals.replayed, identity, task_id, record, line=_PUBLISHED_BEFORE)
                return task.AsyncResult(record.task_id)
            return send()
        case Mismatched(record):
            report(signals.mismatched, identity, task_id, record)
            raise FingerprintMismatch(
                f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a key "
                "stands "
                "for one intention."
            )
        case Reserved(record):
            _as_task(options, record.task_id)
            try:
                sent = send()
            except BaseException:
                try:
                    key_change.give_back(store, identified, record)
                except IdempotencyError as error:
                    logger.warning("idempotency: a reservation is left to its deadline: %s", error)
                raise
            report(signals.reserved, identity, record.task_id, record, state=State.QUEUED)
            return sent


def _as_task(options: dict[str, Any], task_id: str) -> None:
    """Let a call go out under the task id that its key has already."""
    said = read_stamp(options["headers"], options["task_id"])
    options["task_id"] = task_id
    options["headers"] = with_stamp(options["headers"], task_id, more=said)


def until_lost(options: Mapping[str, Any]) -> int:
    """Return in how many milliseconds a message that is published now counts as lost."""
    wait = 0.0
    eta = options.get("eta")
    if options.get("countdown"):
        wait = float(options["countdown"])
    elif isinstance(eta, (datetime, str)):
        eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
        now = datetime.now(timezone.utc)
        wait = ((eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)) - now).total_seconds()
    return RESERVED_MS + max(int(wait * 1000), 0)
