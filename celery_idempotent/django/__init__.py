"""For Django projects: the task class with ``delay_on_commit``, and the scope of a user's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore

from celery_idempotent.celery.task import IdempotentTask as _IdempotentTask
from celery_idempotent.django import outbox
from celery_idempotent.django.scopes import user_scope
from celery_idempotent.django.transactions import alias_in_use, transactions_around

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_idempotent.celery.typed import Sig

__all__ = ["IdempotentTask", "user_scope"]


class IdempotentTask(_IdempotentTask, DjangoTask):  # type: ignore[type-arg]  # generic only in the stubs
    """:class:`celery_idempotent.IdempotentTask`, with Celery's ways to publish after a commit.

    Within an atomic task (``idempotency_atomic=True``) they stage the message in the task's own transaction: it is
    committed with what the task wrote, and never lost after that (see :mod:`celery_idempotent.django.outbox`). So does
    ``self.replace``. Everywhere else they do what Celery's do.
    """

    abstract = True
    transactions_around = staticmethod(transactions_around)

    def delay_on_commit(self, *args: object, **kwargs: object) -> Any:
        """Call :meth:`delay` when the transaction at work is committed; returns nothing, as Celery's."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Call :meth:`apply_async` when the transaction at work is committed; returns nothing, as Celery's.

        Raises:
            IdempotencyError: within an atomic task, if the call cannot be staged.
        """
        options |= zip(("task_id", "producer", "link", "link_error", "shadow"), rest, strict=False)
        alias = alias_in_use()
        if alias is None or self.app.conf.task_always_eager:
            defer: Callable[..., object] = super().apply_async_on_commit
            defer(args, kwargs, **options)
            return
        outbox.stage(self, args, kwargs, options, using=alias)

    def on_replace(self, sig: Sig) -> Any:
        """Publish the replacement: that of an atomic task after the commit, of which its message is part."""
        alias = alias_in_use()
        if alias is None or self.request.is_eager:
            return super().on_replace(sig)
        outbox.stage(sig, using=alias)
        raise Ignore("Replaced by new task")
