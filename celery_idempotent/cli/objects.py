"""Records as JSON objects and as rows: one form in every command."""

from __future__ import annotations

from collections.abc import Sequence

from celery_idempotent.cli import output
from celery_idempotent.cli.output import Column
from celery_idempotent.cli.session import Session
from celery_idempotent.operations.finding import scope_in_words, task_name
from celery_idempotent.operations.wording import ago, iso
from celery_idempotent.records import Record

#: Of a list; the narrow ones come first.
COLUMNS = (
    Column(title="KEY", least=16),
    Column(title="TASK", least=12),
    Column(title="SCOPE", least=8),
    Column(title="STATE"),
    Column(title="CHANGED", right=True),
    Column(title="CRASHES", right=True, from_width=100),
    Column(title="TASK ID", from_width=160, least=8),
    Column(title="WORKER", from_width=100, least=8),
)


def shown_state(record: Record, now_ms: int) -> str:
    """Return the state for people: one whose lease ran out is stale."""
    return f"{record.state.value}, stale" if record.stale(now_ms) else record.state.value


def cells_of(session: Session, record: Record, now_ms: int, *, whole: bool) -> list[str]:
    """Return the cells of a record; ``whole``: for a pipe, where times do not depend on now."""
    changed = iso(record.updated_ms) if whole else ago(record.updated_ms, now_ms)
    return [
        record.identity.key,
        task_name(session.app, record.identity),
        record.identity.scope if whole else scope_in_words(record.identity.scope),
        shown_state(record, now_ms),
        changed or "",
        str(record.crashes) if record.crashes or whole else "",
        record.task_id,
        record.worker if whole else record.worker.partition("/")[0],
    ]


def object_of(session: Session, record: Record, now_ms: int) -> dict[str, object]:
    """Return a record for programs; times are those of the store's clock."""
    return {
        "key": record.identity.key,
        "task": task_name(session.app, record.identity),
        "scope": record.identity.scope,
        "state": record.state.value,
        "stale": record.stale(now_ms),
        "namespace": record.identity.namespace,
        "token": record.token,
        "task_id": record.task_id,
        "worker": record.worker,
        "crashes": record.crashes,
        "attempts": record.attempts,
        "created": iso(record.created_ms),
        "updated": iso(record.updated_ms),
        "deadline": iso(record.deadline_ms),
    }


def write_table(session: Session, records: Sequence[Record], now_ms: int) -> None:
    """Write records as a table."""
    whole = not output.on_terminal()
    output.table(COLUMNS, [cells_of(session, each, now_ms, whole=whole) for each in records])
