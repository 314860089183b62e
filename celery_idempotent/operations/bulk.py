"""One operation on all records that a filter means: looked for first, then done one by one, as far as one comes.

Nothing is locked between the two. Each record is operated on as it was seen, by its token and its state::

    operator   look: order-17 is FAILED, token 7 ─ ask ─────────────────────── forget, if FAILED with token 7: CHANGED
    worker                                           claim: PROCESSING, token 8
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from celery_idempotent.celery.operations import (
    Operation,
    OperationRequest,
    Outcome,
    is_live,
    offered,
    operate,
)
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity, Page, Record, State

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

#: What is to become of a record: it is done; its owner is live; the operation means nothing for it.
Verdict = Literal["do", "live", "left"]

#: After so many records in a row for which the store did not answer no further one is tried: each takes a time-out.
_SILENT = 2


class SeenRecord(Protocol):
    """A record as somebody saw it, who decided what is to be done to it."""

    @property
    def identity(self) -> Identity:
        """Which record it is."""

    @property
    def token(self) -> int:
        """The token that it had."""

    @property
    def state(self) -> State:
        """The state that it was in."""


SeenT = TypeVar("SeenT", bound=SeenRecord)


@dataclass(frozen=True, slots=True)
class Ended(Generic[SeenT]):
    """What came of an operation on one record: an outcome, or the trouble that kept us from knowing it."""

    record: SeenT
    outcome: Outcome | None
    trouble: str = ""


def verdict(
    operation: Operation,
    record: Record,
    now_ms: int,
    *,
    known: bool = True,
    step: str | None = None,
) -> Verdict:
    """Say what an operation would do to a record, or to one step of it; see :func:`.offered`."""
    if operation not in offered(record, known=known, step=step):
        return "left"
    return "live" if is_live(record, now_ms) else "do"


def may_repeat(operation: Operation, state: State) -> bool:
    """May something that took effect before be done a second time because of this operation?"""
    return operation in {"release", "requeue", "forget"} and state is not State.QUEUED


def collect(
    store: Store, operation: Operation, pages: Iterable[Page], *, limit: int
) -> tuple[list[Record], bool]:
    """Return the records of these pages, each once, up to a limit, and whether there are more."""
    found: dict[Identity, Record] = {}
    cut = False  # did the search end before all records were looked at?
    for page in pages:
        cut = bool(page.cursor)
        for each in page.records:
            if len(found) == limit:
                return list(found.values()), True
            # Lists leave out whether there is a message.
            record = store.get(each.identity) if operation == "requeue" else each
            if record is not None:
                found[record.identity] = record
    return list(found.values()), cut


def execute(
    app: Celery, request: OperationRequest, records: Iterable[SeenT]
) -> Iterator[Ended[SeenT]]:
    """Do what is asked for to one record after the other; each is yielded as soon as it is done.

    What goes wrong with one keeps none of the others, unless the store is silent: then those that follow are not tried.
    """
    silent, operation = 0, request.operation
    for record in records:
        try:
            outcome = operate(app, record.identity, request, token=record.token, state=record.state)
        except IdempotencyError as error:  # noqa: PERF203  each by itself
            logger.warning("idempotency: %s of %s failed: %s", operation, record.identity, error)
            yield Ended(record, None, str(error))
            silent += 1
            if silent == _SILENT:
                return
        except Exception as error:  # a fault that concerns one record
            logger.exception("idempotency: %s of %s failed", operation, record.identity)
            yield Ended(record, None, f"{type(error).__name__}. The log says more.")
        else:
            silent = 0
            yield Ended(record, outcome)
