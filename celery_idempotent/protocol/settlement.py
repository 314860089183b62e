"""How a claim is to be settled: the end state, what is stored with it, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from celery_idempotent.protocol.calls import OutcomeResult
from celery_idempotent.protocol.telling import Line
from celery_idempotent.records import EndState, SettledWith, SettleRequest, Stored

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store


class Settlement(NamedTuple):
    """How a claim is to be settled."""

    state: EndState
    #: Serializes the result or the exception of the body; called for each try.
    dump: Callable[[], Stored | None]
    #: The exception, for the report.
    error: BaseException | None = None
    #: What is logged instead of the usual line.
    line: Line | None = None
    #: Celery's result, if it may be written together with the record.
    result: OutcomeResult | None = None

    def write(self, store: Store, request: SettleRequest) -> bool:
        """Write the end state, and the result with it where that can be; ``False``: a newer claim has the key."""
        if self.result is None or (result := self.result.write_for(store, self.state)) is None:
            return store.settle(request)
        written = store.settle_with_result(request, result)
        if written is SettledWith.RESULT:
            self.result.note_written(self.state)
        return written is not SettledWith.LOST
