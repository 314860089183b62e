"""``self.replace``: the record says *replaced*, and the replacement is published once the record has it.

::

    run ─ self.replace(sig) ─ settle: COMPLETED, replaced, with sig in it ─┬─ publish sig ─ mark ─ ack
                                                                           └─ ✗ redelivered: publish sig

So the replacement is never lost, and ``run()`` is not repeated for it. A replacement that has this task's own key must
find that free: then the key is given back before, and nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from celery.exceptions import Ignore

from celery_idempotent.celery import delivery
from celery_idempotent.celery.definition import Definition
from celery_idempotent.celery.reserving import lost_after_ms
from celery_idempotent.celery.typed import Sig
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.identity import stamp
from celery_idempotent.identity.stamp import as_mapping
from celery_idempotent.identity.trees import AnySignature, canvas_tasks, unstamp
from celery_idempotent.protocol.claim import Claim, Phase, current_claim
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask


def replace(
    task: IdempotentTask,
    definition: Definition,
    sig: Sig,
    celery_replace: Callable[[Sig], object],
) -> object:
    """Replace the task by Celery's own ``replace``, after what its claim needs."""
    claim = current_claim()
    unstamp(sig, task.request.id)
    if claim is None or claim.record.task_id != task.request.id:
        return celery_replace(sig)
    parts = canvas_tasks(sig)
    if any(_has_identity(part, task.name, definition, claim.record.identity) for part in parts):
        if claim.transaction is not None:
            raise IdempotencyError(
                f"{task.name} is atomic, and cannot be replaced by a call with its own key, which is not free "
                "before its transaction is committed: give the replacement a key of its own."
            )
        # When a task of a canvas is sent is not known: no deadline, or it would count as lost before.
        lost_ms = lost_after_ms(sig.options) if parts == [sig] else None
        definition.runner.release(claim, requeue_ms=lost_ms)
    if claim.phase is Phase.RELEASED or task.request.is_eager:
        return celery_replace(sig)
    claim.replaced = True
    try:
        return celery_replace(sig)
    except Ignore:
        raise
    except BaseException:
        claim.replaced = False
        raise


def publish_after_settle(
    task: IdempotentTask, definition: Definition, sig: Sig, claim: Claim | None
) -> None:
    """Leave a replacement with the claim, to be published once the record has it; return if Celery is to publish it.

    Raises:
        Replaced: with what is due after the settle.
        IdempotencyError: in an atomic task that has no outbox.
    """
    if claim is not None and claim.transaction is not None and not task.request.is_eager:
        raise IdempotencyError(
            f"{task.name} is atomic, and its replacement has to be staged in its transaction: take "
            "celery_idempotent.django.IdempotentTask as its base."
        )
    if claim is None or not claim.replaced or definition.policy.mode != "enforce":
        return
    claim.replacement = definition.codec.dump_replacement(sig)
    if claim.replacement is not None:
        held = claim.store, claim.record.identity, claim.token
        due = delivery.Due(mark=delivery.mark_function(*held))
        raise delivery.Replaced(sig, due, delivery.forget_function(*held))


def _has_identity(sig: AnySignature, name: str, definition: Definition, identity: Identity) -> bool:
    """Will this signature claim the same key?"""
    if sig.get("task") != name:
        return False
    options = as_mapping(sig.get("options"))
    said = stamp.read_stamp(as_mapping(options.get("headers")), None)
    identified = definition.identifier.identify(
        sig.get("args"),
        sig.get("kwargs"),
        task_id="",
        key=options.get(stamp.KEY_HEADER, said.get(stamp.RAW_KEY)),
        scope=options.get(stamp.SCOPE_HEADER, said.get(stamp.RAW_SCOPE)),
    )
    return identified.identity == identity
