"""``list``, ``show``, ``stats``; ``sweep``, ``prune``, ``check``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import click

from celery_idempotent.celery import finding
from celery_idempotent.celery.checks import check
from celery_idempotent.celery.finding import Found
from celery_idempotent.celery.story import (
    Story,
    ago,
    check_health,
    iso,
    show_value,
    tell_absence,
    tell_story,
)
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.cli.session import (
    FOUND,
    UNREACHABLE,
    Command,
    Session,
    command,
    django_part,
    json_option,
    key_options,
    note,
    object_of,
    paragraph,
    scopes_of,
    selection_options,
    session_of,
    table,
    write_json,
    write_records,
)
from celery_idempotent.records import Record, Selection

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

#: So many seconds are spent on a look for the same key in other scopes, unless --scan asks for all of it.
SCAN_SECONDS = 10.0

#: The finding that the store does not answer.
_STORE_DOWN = "E006"

_LIMIT = click.option(
    "--limit",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="So many records in one step.",
)


@command(
    "list",
    "list --state stale",
    "list --task shop.charge --state FAILED --since 10m",
    "list --key order-17",
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
def list_command(session: Session, limit: int, as_json: bool, **given: Any) -> None:
    """List records: the unfinished and the failed ones, or those of a --state.

    COMPLETED records have no index: to list them (--key, --scope, --state any), keys are looked at one after the
    other, until --limit is reached.
    """
    selection = session.selection(given)
    records = (each for page in finding.pages(session.store, selection) for each in page.records)
    found = list(islice(records, limit))
    now_ms = session.store.now_ms()
    if as_json:
        for record in found:
            write_json(object_of(session, record, now_ms))
    elif found:
        write_records(session, found, now_ms)
    if len(found) == limit:
        note(f"The first {limit}. There may be more: --limit takes a larger number.")
    elif not found:
        left_out = "" if selection.scans else " COMPLETED ones are listed with --state COMPLETED."
        note(f"No such records.{left_out}")


@command("stats", "stats --hours 1")
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
        write_json(
            {
                **{name: getattr(stats, name) for name in names},
                "at_least": sorted(stats.at_least),
                "last_sweep": iso(stats.swept_ms),
                "hours": hours,
                "outcomes": {name: dict(sorted(of.items())) for name, of in sorted(counts.items())},
            }
        )
        return
    said = ", ".join(f"{stats.said(name)} {name}" for name in names)  # type: ignore[arg-type]  # they are
    paragraph(f"{said}. COMPLETED records are not counted.")
    swept = "none has ended yet" if stats.swept_ms is None else ago(stats.swept_ms, stats.now_ms)
    paragraph(f"Last sweep: {swept}.")
    if not session.store.supports_counting:
        note("This store does not count outcomes.")
        return
    rows = [
        [name, *(f"{sum(of[each] for each in outcomes):,}" for outcomes in _OUTCOMES.values())]
        for name, of in sorted(counts.items())
    ]
    hour = "hour" if hours == 1 else f"{hours} hours"
    if not rows:
        note(f"No outcomes in the last {hour}.")
        return
    paragraph(f"In the last {hour}:")
    table(["TASK", *_OUTCOMES], rows)


# -- show --------------------------------------------------------------------------------------------------------------


@command(
    "show",
    "show order-17 --task shop.charge",
    "explain 7d0b0a5e-5d3c-4f4e-9c0e-1f6f5a4f2c11",
)
@click.argument("key")
@key_options
@click.option("--scan", is_flag=True, help="Look at every key, however long that takes.")
@click.option("--value", is_flag=True, help="Also the result or error, which may hold secrets.")
@json_option
def show_command(
    session: Session,
    key: str,
    task: str | None,
    scope: str | None,
    scan: bool,
    value: bool,
    as_json: bool,
) -> None:
    """Say why KEY is as it is: what happened, what happens next, what can be done.

    Without --scope, every scope is searched for KEY, for ten seconds or (--scan) to the end. KEY may also be the id of
    a task, as it stands in a log: a completed record is found by it with --scan. --json has every field of the record.
    """
    record, others = _find(session, key, task=task, scope=scope, scan=scan)
    story = tell_story(session.app, session.store, record)
    now_ms = session.store.now_ms()
    shown = show_value(session.app, record) if value else None
    if as_json:
        about = object_of(session, record, now_ms) | {
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            "reserved": record.reserved,
            "delivered": record.delivered,
            "replaced": record.replaced,
            "on_stale": record.on_stale,
            "message": record.message is not None,
            "steps": [name for name, _ in record.steps],
            "explanation": asdict(story) | {"choices": [each._asdict() for each in story.choices]},
            "elsewhere": [object_of(session, each, now_ms) for each in others.records],
        }
        if shown is not None:
            about["value"] = shown.text or shown.trouble
        write_json(about)
    else:
        _write_story(session, story, record)
        if shown is not None:
            click.echo(f"\nValue\n{shown.text or shown.trouble}")
        if others.records:
            click.echo("\nThe same key elsewhere")
            write_records(session, others.records, now_ms)
    if others.cut:
        note("Other scopes were searched in part: --scan looks at every key.")


explain_command = show_command


def find_one(session: Session, text: str, *, task: str | None, scope: str | None) -> Record:
    """Return the one record that is meant; if there is none, or several, say so and end."""
    return _find(session, text, task=task, scope=scope, everywhere=False)[0]


def _find(
    session: Session,
    text: str,
    *,
    task: str | None,
    scope: str | None,
    scan: bool = False,
    everywhere: bool = True,
) -> tuple[Record, Found]:
    """Return the record that is meant, and those of the same key elsewhere.

    ``everywhere``: look for these also if the key was found where it was expected.
    """
    if not text:
        raise click.UsageError("KEY is empty.")
    namespace = session.known_namespace(task) if task else None
    namespaces = session.namespaces() if namespace is None else [namespace]
    meant: Sequence[Record] = finding.find_key(
        session.store, namespaces, text, scopes_of(scope) if scope else [""]
    )
    others, cut = Found(), False
    if not meant:
        selection = Selection(states=finding.UNFINISHED_AND_FAILED, namespace=namespace)
        by_id = finding.find_task_id(session.store, text, selection)
        meant, cut = by_id.records, by_id.cut
        if meant:
            note(f"Found by its task id: {meant[0].identity}.")
    if scope is None and (not meant or (everywhere and len(meant) == 1)):
        key = meant[0].identity.key if meant else text
        found = finding.find_key_anywhere(
            session.store,
            [key, *finding.spellings(key)],
            namespace=namespace,
            task_id=text if scan and not meant else "",
            seconds=None if scan else SCAN_SECONDS,
        )
        known = {record.identity for record in meant}
        elsewhere = [each for each in found.records if each.identity not in known]
        if not meant and len(elsewhere) == 1:
            meant, elsewhere = finding.read_whole(session.store, elsewhere), []
            note(f"Found by a look at every scope: {meant[0].identity}.")
        others = Found(elsewhere, cut=found.cut)
    if len(meant) == 1:
        return meant[0], others
    if several := [*meant, *others.records]:
        note(f"{text} is a key of {len(several)} records: say which one by --task or --scope.")
        write_records(session, several, session.store.now_ms())
        raise click.exceptions.Exit(FOUND)
    where = f"{task or 'any task of this app'}{f', scope {scope}' if scope else ''}"
    _write_story(session, tell_absence(f"{text} in {where}"))
    if others.cut or cut or not scan:
        note("Not every record was looked at, nor every task id: `show --scan` does.")
    raise click.exceptions.Exit(FOUND)


def _write_story(session: Session, story: Story, record: Record | None = None) -> None:
    paragraph(story.headline, bold=True)
    for title, sentences in (("So far", story.past), ("Next", story.future)):
        if sentences and story.future:
            click.echo(f"\n{title}")
        for each in sentences:
            paragraph(each, indent="  - ")
    if record is None or not story.choices:
        return
    click.echo("\nWhat you can do")
    if story.live:
        paragraph("wait. Or, with --force and a --reason:", indent="  - ")
    for choice in story.choices:
        paragraph(f"{choice.operation} {choice.effect} {choice.cost}", indent="  - ")
    identity = record.identity
    task = finding.task_name(session.app, identity)
    scope = f" --scope {shlex.quote(identity.scope)}" if identity.scope else ""
    arguments = f"{shlex.quote(identity.key)} --task {shlex.quote(task)}{scope}"
    click.echo(f"\n  celery -A {session.name} idempotency OPERATION {arguments}")


# -- upkeep ------------------------------------------------------------------------------------------------------------


@command("sweep", "sweep")
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


@command("prune", "prune")
@_LIMIT
@json_option
def prune_command(session: Session, limit: int, as_json: bool) -> None:
    """Delete all records that are past their retention, in steps of --limit.

    Redis deletes records by itself; there only their entries in the indexes are left to this.
    """
    pruned = 0
    try:
        while (count := session.store.prune(limit=limit)) > 0:
            pruned += count
    except KeyboardInterrupt:
        note(f"\nInterrupted: {pruned:,} deleted. Run it again for the rest.")
        raise click.exceptions.Exit(FOUND) from None
    if as_json:
        write_json({"pruned": pruned})
    else:
        paragraph(f"{pruned:,} deleted.")


@click.command("check", cls=Command, examples=["check", "check --health"])
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
        _write_health(session_of(ctx), as_json=as_json)
        return
    found = check(ctx.obj.app)
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


def _write_health(session: Session, *, as_json: bool) -> None:
    """Write whether all is well right now, and end with the exit code."""
    outbox = django_part("celery_idempotent.django.outbox")
    waits = None if outbox is None else outbox.oldest_ms(using=session.store.outbox_alias)
    found, sweeps = check_health(session.app, session.store, outbox_ms=waits)
    if as_json:
        write_json(found)
    else:
        oldest = found["outbox"]["oldest_s"]
        sentences = {
            "store": f"It counted in {found['store']['answered_ms']:.0f} ms.",
            "sweep": sweeps,
            "outbox": "Nothing waits." if oldest is None else f"A message waits for {oldest} s.",
        }
        for name, text in sentences.items():
            well = "well     " if found[name]["well"] else "TROUBLE  "
            paragraph(text, indent=f"{name:<8}{well}")
    if not found["well"]:
        raise click.exceptions.Exit(FOUND)
