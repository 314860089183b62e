"""What a finished task sends on (links, the next step of a chain, its part of a chord), and whether it was sent.

A worker may die between the settle and the sending, or between the sending and the ack. The message then comes back,
finds its own record settled, and must send on in the first case and be silent in the second. So the record is marked as
*delivered* once everything was sent, in a third round trip that only requests with something to send pay for::

    run ─ settle ─┬─ ✗ ······················· redelivered: answered in full, Celery sends
                  └─ links, chain, chord, result ─ mark ─┬─ ✗ ···· redelivered: answered silently
                                                         └─ ack
    between the sending and the mark: sent twice, under the same ids, so that an IdempotentTask downstream runs once
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

from celery.canvas import maybe_signature
from celery.signals import task_failure, task_success
from celery.utils.functional import maybe_list

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores.base import Store

__all__ = ["derive_ids", "expect", "sends_on", "silence"]

logger = logging.getLogger(__name__)

#: Where the mark that is due is kept while the request is at work.
_EXPECTED = "idempotency_delivery"

_COMPOSITES = {
    "celery.chain": ("tasks",),
    "celery.group": ("tasks",),
    "celery.chord": ("header", "body"),
}


def sends_on(request: Any) -> bool:
    """Does this request have anything to send when it is done?"""
    return bool(request.callbacks or request.errbacks or request.chain or request.chord)


def silence(request: Any) -> None:
    """Let Celery send nothing for this request: all of it was sent before."""
    request.callbacks = request.errbacks = request.chain = request.chord = None


def expect(request: Any, store: Store, identity: Identity, token: int) -> None:
    """Remember to mark this record as delivered once Celery has sent what the request has to send."""
    setattr(request, _EXPECTED, (store, identity, token))


@task_success.connect(weak=False, dispatch_uid="celery_idempotent.delivered")
@task_failure.connect(weak=False, dispatch_uid="celery_idempotent.delivered")
def mark(sender: Any = None, **_: Any) -> None:
    """Mark the record: Celery says so after it sent everything (and stored the result), before the ack.

    Signals, because users override ``on_success`` and ``on_failure`` without calling ours.
    """
    expected = getattr(getattr(sender, "request", None), _EXPECTED, None)
    if expected is None:
        return
    store, identity, token = expected
    try:
        store.mark_delivered(identity, token=token)
    except IdempotencyError as error:
        logger.warning(
            "idempotency: %s is done and its callbacks are sent, which could not be noted: should its message "
            "come back, "
            "they are sent again, under the same ids: %s",
            identity,
            error,
        )


def derive_ids(app: Celery, links: Any, parent_id: str, kind: str) -> Any:
    """Return ``links`` with task ids made from the parent's id where they have none.

    Celery gives a callback a new id each time it sends it; with these a callback that a crash made it send twice has
    the same id both times.
    """
    derived = [
        maybe_signature(_derive(link, f"{parent_id}/{kind}/{index}"), app=app)
        for index, link in enumerate(maybe_list(links) or [])
    ]
    return derived or links


def _derive(signature: Any, path: str) -> Any:
    if not isinstance(signature, dict):
        return signature
    options = signature.get("options") or {}
    parts = _COMPOSITES.get(str(signature.get("task")))
    if parts is None:
        task_id = options.get("task_id") or str(uuid.uuid5(uuid.NAMESPACE_URL, path))
        return {**signature, "options": {**options, "task_id": task_id}}
    kwargs = dict(signature.get("kwargs") or {})
    for part in parts:
        inner = kwargs.get(part)
        if isinstance(inner, (list, tuple)):
            kwargs[part] = [_derive(each, f"{path}/{n}") for n, each in enumerate(inner)]
        elif inner is not None:
            kwargs[part] = _derive(inner, f"{path}/{part}")
    return {**signature, "kwargs": kwargs}
