"""The methods of a task about its records: ``task.idempotency_record``, ``idempotency_forget`` and the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from celery_idempotent.celery.definition import DefinedTask
from celery_idempotent.celery.operations import OperationRequest, operate_or_raise
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from typing_extensions import Unpack


class How(TypedDict, total=False):
    """What every operation takes: why, who does it, and whether a live owner loses the key."""

    reason: str
    who: str
    force: bool


class RecordMethods(DefinedTask):
    """A task that has records."""

    abstract = True

    def idempotency_record(self, key: object, *, scope: object = None) -> Record | None:
        """Return the record of a key of this task, or ``None``.

        Raises:
            InvalidKey: if the key or scope cannot be used.
            StoreUnavailable: if the store did not answer.
        """
        return get_store(self.app).get(self._ours().identifier.identity(key, scope))

    def idempotency_forget(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Delete the record of a key of this task: the next call with it runs again. ``False`` if there was none.

        The log and the signal ``forgotten`` say who did it (this process, if no one is named) and the reason. To take
        the key away from a live owner, who may still be at work, this has to be forced, with a reason.

        Raises:
            InProgress: if an owner within its lease holds the key, and this is not forced.
            InvalidKey: if the key or scope cannot be used.
            StoreUnavailable: if the store did not answer.
        """
        return self._operate(OperationRequest("forget", **how), key, scope)

    def idempotency_release(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """End the claim of a key of this task: the next delivery or call runs. ``False`` if nothing is queued or runs.

        It is reported, refused and forced as :meth:`idempotency_forget` is, and raises the same.
        """
        return self._operate(OperationRequest("release", **how), key, scope)

    def idempotency_requeue(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Publish the message that the record of a key keeps once more. ``False`` if it keeps none.

        That takes ``idempotency_on_stale="requeue"``, and an unfinished run. It is reported, refused and forced as
        :meth:`idempotency_forget` is, and raises the same.
        """
        return self._operate(OperationRequest("requeue", **how), key, scope)

    def idempotency_complete(
        self, key: object, value: object, *, scope: object = None, **how: Unpack[How]
    ) -> bool:
        """Settle an unfinished or failed key of this task COMPLETED: callers get ``value``. ``False`` if there is none.

        Use this if the task took effect and its result was not recorded: ``value`` is what it would have
        returned. The record stores who and why. It is reported, refused and forced as :meth:`idempotency_forget` is,
        and raises the same.

        Raises:
            ValueError: if the value cannot be written as the task writes its results, or is too large.
        """
        stored = self._ours().codec.dump_given(value)
        return self._operate(OperationRequest("complete", value=stored, **how), key, scope)

    def idempotency_fail(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Settle an unfinished key of this task FAILED: callers get ``FailedByOperator``. ``False`` if there is none.

        The record keeps who and why. It is reported, refused and forced as :meth:`idempotency_forget` is, and raises
        the same.
        """
        return self._operate(OperationRequest("fail", **how), key, scope)

    def _operate(self, request: OperationRequest, key: object, scope: object) -> bool:
        return operate_or_raise(self.app, self._ours().identifier.identity(key, scope), request)
