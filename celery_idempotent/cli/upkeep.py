"""``sweep`` and ``prune``: the work that beat asks for, by hand."""

from __future__ import annotations

import click

from celery_idempotent.celery.reaper import sweep
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import Progress, note, paragraph, write_json
from celery_idempotent.cli.session import FOUND, Session, command

_LIMIT = click.option(
    "--limit",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="So many records in one step.",
)


@command("sweep", examples=["sweep"])
@_LIMIT
@json_option
def sweep_command(session: Session, limit: int, as_json: bool) -> None:
    """Do what beat asks for every idempotency_sweep_interval, once, now.

    Stale records are interrupted, failed or requeued, as their tasks say; what is past its retention is deleted; the
    outbox is sent. Safe beside other sweeps.
    """
    counts = sweep(session.app, limit=limit)
    if as_json:
        write_json(counts)
        return
    paragraph(
        ", ".join(f"{name} {value}" for name, value in counts.items() if name != "more") + "."
    )
    if counts["more"]:
        note("There is more to do: run it again.")


@command("prune", examples=["prune"])
@_LIMIT
@json_option
def prune_command(session: Session, limit: int, as_json: bool) -> None:
    """Delete all records that are past their retention, in steps of --limit.

    Redis deletes records by itself; there only their entries in the indexes are left to this.
    """
    with Progress("records deleted") as progress:
        try:
            while (count := session.store.prune(limit=limit)) > 0:
                progress.add(count)
        except KeyboardInterrupt:
            note(f"\nInterrupted: {progress.count:,} deleted. Run it again for the rest.")
            raise click.exceptions.Exit(FOUND) from None
    if as_json:
        write_json({"pruned": progress.count})
    else:
        paragraph(f"{progress.count:,} deleted.")
