"""``sweep``, ``prune`` and ``outbox``: the work that beat asks for, by hand."""

from __future__ import annotations

import click

from celery_idempotent.celery.reaper import sweep
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import Column, Progress, note, paragraph, table, write_json
from celery_idempotent.cli.session import FOUND, Session, command, django_part
from celery_idempotent.operations.wording import time_in_words

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


@command("outbox", examples=["outbox"])
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="So many messages at most.",
)
@json_option
def outbox_command(session: Session, limit: int, as_json: bool) -> None:
    """List messages that are committed and not sent yet, the oldest first (Django only).

    The sweep sends them; `sweep` does it now.
    """
    alias = session.store.outbox_alias
    outbox = django_part("celery_idempotent.django.outbox")
    if alias is None or outbox is None:
        raise click.UsageError(
            "There is no outbox: that takes a Django project with celery_idempotent.django, and a store in a database"
            " (django:// or hybrid+…). This app's store is " + type(session.store).__name__ + "."
        )
    found = outbox.pending(using=alias, limit=limit + 1)
    names = ("task", "task_id", "key", "scope", "app", "age_ms", "due_in_ms", "attempts", "error")
    if as_json:
        for each in found[:limit]:
            write_json({name: getattr(each, name) for name in names})
    elif found:
        columns = [
            *(Column(title=title, least=8) for title in ("TASK", "KEY", "SCOPE")),
            Column(title="WAITS FOR", right=True),
            Column(title="FAILED", right=True),
            Column(title="ERROR", from_width=100, least=8),
            Column(title="TASK ID", from_width=140, least=8),
        ]
        table(
            columns,
            [
                [
                    each.task,
                    each.key,
                    each.scope,
                    time_in_words(each.age_ms),
                    str(each.attempts) if each.attempts else "",
                    each.error,
                    each.task_id,
                ]
                for each in found[:limit]
            ],
        )
    else:
        note("Nothing waits.")
    if len(found) > limit:
        note(f"The first {limit}. There are more: --limit takes a larger number.")
