"""What happens to a call on its way to the broker: its stamp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery.utils import uuid

from celery_idempotent.definition import Definition
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
from celery_idempotent.lease import Claim, current_claim

if TYPE_CHECKING:
    from celery_idempotent.task import IdempotentTask

__all__ = ["identify", "publish"]


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
    """
    retried = _retried(task, definition, options)
    identify(definition, args, kwargs, options, retried)
    if retried is not None:
        # Before the retry is on its way, so that it never meets its predecessor's claim.
        definition.runner.release(retried)
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
