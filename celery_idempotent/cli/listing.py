"""``list`` and ``stats``: which records there are, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.cli import output
from celery_idempotent.cli.options import json_option, selection_of, selection_options
from celery_idempotent.cli.session import Session, command
from celery_idempotent.operations.finding import pages, scope_in_words, task_name
from celery_idempotent.operations.wording import ago, iso
from celery_idempotent.records import Record

#: The narrow ones come first.
_COLUMNS = ("KEY", "TASK", "SCOPE", "STATE", "CHANGED", "CRASHES", "TASK ID", "WORKER")

#: The columns of the table of counts: what ran, what did not have to run again, what needs somebody.
_OUTCOMES = {
    "RUNS": ("claimed",),
    "RELEASED": ("released",),
    "FAILED": ("failed",),
    "REPLAYS": ("replayed",),
    "CONFLICTS": ("conflicted",),
    "MISMATCHES": ("mismatched",),
    "CRASHES": ("interrupted", "requeued"),
    "LOST": ("lease_lost", "settle_failed", "store_failed"),
}


def cells_of(session: Session, record: Record, now_ms: int, *, whole: bool) -> list[str]:
    """Return the cells of a record; ``whole``: for a pipe, where times do not depend on now."""
    changed = iso(record.updated_ms) if whole else ago(record.updated_ms, now_ms)
    stale = ", stale" if record.stale(now_ms) else ""
    return [
        record.identity.key,
        task_name(session.app, record.identity),
        record.identity.scope if whole else scope_in_words(record.identity.scope),
        record.state.value + stale,
        changed or "",
        str(record.crashes) if record.crashes or whole else "",
        record.task_id,
        record.worker if whole else record.worker.partition("/")[0],
    ]


def object_of(session: Session, record: Record, now_ms: int) -> dict[str, object]:
    """Return a record for programs; times are those of the store's clock."""
    identity = record.identity
    return {
        "key": identity.key,
        "task": task_name(session.app, identity),
        "scope": identity.scope,
        "state": record.state.value,
        "stale": record.stale(now_ms),
        "namespace": identity.namespace,
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
    rows = [cells_of(session, each, now_ms, whole=whole) for each in records]
    output.table(_COLUMNS, rows, least=4)


@command(
    "list",
    examples=[
        "list --state stale",
        "list --task shop.charge --state FAILED --since 10m",
        "list --key order-17",
    ],
)
@selection_options
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="So many records at most.",
)
@json_option
def list_command(session: Session, limit: int, as_json: bool, **given: object) -> None:
    """List records: the unfinished and the failed ones, or those of a --state.

    COMPLETED records have no index: to list them (--key, --scope, --state any), keys are looked at one after the
    other, until --limit is reached.
    """
    selection = selection_of(session, given)
    found: list[Record] = []
    now_ms, more = 0, False
    with output.Progress("keys looked at") as progress:
        for page in pages(session.store, selection):
            progress.add(page.looked_at)
            now_ms = page.now_ms
            left = limit - len(found)
            found += page.records[:left]
            more = len(page.records) > left or (len(found) == limit and bool(page.cursor))
            if len(found) == limit:
                break
    if as_json:
        for record in found:
            output.write_json(object_of(session, record, now_ms))
    elif found:
        write_table(session, found, now_ms)
    if more:
        output.note(f"The first {limit}. There may be more: --limit takes a larger number.")
    elif not found:
        left_out = "" if selection.scans else " COMPLETED ones are listed with --state COMPLETED."
        output.note(f"No such records.{left_out}")


@command("stats", examples=["stats --hours 1"])
@click.option("--task", metavar="NAME", help="Only the outcomes of this task.")
@click.option(
    "--hours",
    type=click.IntRange(1, 720),
    default=24,
    show_default=True,
    help="Outcomes of so many hours.",
)
@json_option
def stats_command(session: Session, task: str | None, hours: int, as_json: bool) -> None:
    """Count records by state, and the outcomes of tasks in the last hours."""
    stats = session.store.stats()
    counts: dict[str, Counter[str]] = {}
    for each in session.store.counts(hours=hours):
        if each.task != SWEEP and task in (None, each.task):
            counts.setdefault(each.task, Counter())[each.outcome] += each.count
    names = ("live", "stale", "interrupted", "failed")
    if as_json:
        known = {name: getattr(stats, name) for name in names}
        output.write_json(
            {
                **known,
                "at_least": sorted(stats.at_least),
                "last_sweep": iso(stats.swept_ms),
                "hours": hours,
                "outcomes": {name: dict(sorted(of.items())) for name, of in sorted(counts.items())},
            }
        )
        return
    said = ", ".join(f"{stats.said(name)} {name}" for name in names)  # type: ignore[arg-type]  # they are
    output.paragraph(f"{said}. COMPLETED records are not counted.")
    swept = "none has ended yet" if stats.swept_ms is None else ago(stats.swept_ms, stats.now_ms)
    output.paragraph(f"Last sweep: {swept}.")
    if not session.store.supports_counting:
        output.note("This store does not count outcomes.")
        return
    rows = [
        [name, *(f"{sum(of[each] for each in outcomes):,}" for outcomes in _OUTCOMES.values())]
        for name, of in sorted(counts.items())
    ]
    hour = "hour" if hours == 1 else f"{hours} hours"
    if not rows:
        output.note(f"No outcomes in the last {hour}.")
        return
    output.paragraph(f"In the last {hour}:")
    output.table(["TASK", *_OUTCOMES], rows)
