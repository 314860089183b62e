"""``sweep``, ``prune`` and ``check``: the work that beat asks for, by hand, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterator

import click

from celery_idempotent.celery.checks import check
from celery_idempotent.celery.sweep import sweep
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import Progress, note, paragraph, write_json
from celery_idempotent.cli.session import (
    FOUND,
    UNREACHABLE,
    OurCommand,
    Session,
    app_named,
    command,
    django_part,
    session_of,
)
from celery_idempotent.operations.health import Health, health
from celery_idempotent.operations.wording import time_in_words

_LIMIT = click.option(
    "--limit",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="So many records in one step.",
)

#: Findings that mean that the store does not answer.
_STORE_DOWN = "E006"


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


@click.command("check", cls=OurCommand, examples=["check", "check --health"])
@click.option(
    "--health", "only_health", is_flag=True, help="Is all well right now? Quick, for orchestrators."
)
@json_option
@click.pass_context
def check_command(ctx: click.Context, only_health: bool, as_json: bool) -> None:
    """Check how the app and its store are set up.

    Each finding has an id, what can go wrong, and what to set. Exit code 1 if there is any, 3 if the store does not
    answer.

    With --health nothing is said about settings: does the store answer, did a sweep end within three intervals, does no
    message wait in the outbox for over a minute?
    """
    if only_health:
        _tell_health(session_of(ctx), as_json=as_json)
        return
    found = check(app_named(ctx))
    for each in found:
        if as_json:
            write_json(
                {"id": each.id, "level": each.level, "problem": each.problem, "hint": each.hint}
            )
        else:
            paragraph(f"{each.problem} {each.hint}", indent=f"{each.id}  ")
    if not found:
        note("Nothing found.")
    codes = {UNREACHABLE if each.id == _STORE_DOWN else FOUND for each in found}
    ctx.exit(max(codes, default=0))


def _tell_health(session: Session, *, as_json: bool) -> None:
    """Tell whether all is well right now, and end with the exit code."""
    outbox = django_part("celery_idempotent.django.outbox")
    waits = None if outbox is None else outbox.oldest_ms(using=session.store.outbox_alias)
    found = health(session.app, session.store, outbox_ms=waits)
    if as_json:
        write_json(found.as_json())
    else:
        for name, well, text in _sentences(found):
            paragraph(text, indent=f"{name:<8}{'well     ' if well else 'TROUBLE  '}")
    if not found.well:
        raise click.exceptions.Exit(FOUND)


def _sentences(found: Health) -> Iterator[tuple[str, bool, str]]:
    yield "store", True, f"It counted in {found.answered_ms:.0f} ms."
    sweeps = found.sweeps
    if sweeps is None or sweeps.interval is None:
        text = "Nobody notes when sweeps end." if sweeps is None else "This app asks for no sweeps."
    else:
        last = "None has ended yet" if sweeps.ago_ms is None else f"The last ended {sweeps.ago} ago"
        text = f"{last}; one is due every {sweeps.interval:g} s."
        text += "" if sweeps.well else " Does beat run?"
    yield "sweep", found.sweeps_well, text
    waits = found.outbox_ms
    text = "Nothing waits." if waits is None else f"A message waits for {time_in_words(waits)}."
    yield "outbox", found.outbox_well, text
