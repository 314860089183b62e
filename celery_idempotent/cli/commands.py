"""The commands: to look at records, to operate on one or on all that are selected, and to keep them up.

An operation goes this way, and is done to each record as it was found, by its token and its state::

    find ─ sort: apply, held, skip ─ preview ─ ask ─ do each ─ summary, exit code
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from click import Argument, Option
from click.exceptions import Exit

from celery_idempotent.celery import finding, story
from celery_idempotent.celery.checks import check
from celery_idempotent.celery.operations import (
    ON_MANY,
    OPERATIONS,
    Operation,
    OperationRequest,
    Outcome,
    operate_on_each,
    verdict,
)
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.cli import session
from celery_idempotent.cli.session import COMMANDS, FOUND, UNREACHABLE, command, note, write
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["COMMANDS"]

#: The seconds of a search for the same key in other scopes.
SCAN_SECONDS = 10.0


@command(
    "list",
    "list --state stale",
    "list --task shop.charge --state FAILED --since 10m",
    "list --key order-17",
    params=[*session.MANY, session.number("limit", 50, "At most this many records.")],
)
def _list(app: Celery, limit: int, as_json: bool, **given: Any) -> None:
    """List records: the unfinished and the failed ones, or those of a --state.

    COMPLETED records have no index: to list them (--key, --scope, --state any), keys are looked at one after the
    other, until --limit is reached.
    """
    page = finding.look(get_store(app), session.selection_of(app, **given), enough=limit)
    found = page.records[:limit]
    if found:
        session.write_records(app, found, page.now_ms, as_json=as_json)
    else:
        note("No such records. COMPLETED ones are listed with --state COMPLETED.")
    if len(found) == limit:
        note(f"The first {limit}. There may be more: --limit takes a larger number.")


@command(
    "show",
    "show order-17 --task shop.charge",
    "explain 7d0b0a5e-5d3c-4f4e-9c0e-1f6f5a4f2c11",
    params=[
        Argument(["key"]),
        *session.ONE,
        Option(["--value"], is_flag=True, help="Also the result or error: it may hold secrets."),
    ],
)
def _show(app: Celery, key: str, value: bool, as_json: bool, **given: Any) -> None:
    """Say why KEY is as it is: what happened, what happens next, what can be done.

    Without --scope, every scope is searched for KEY, for ten seconds. KEY may also be the id of a task, of an
    unfinished or failed record. --json has every field of the record.
    """
    record, others = _find(app, key, **given)
    store = get_store(app)
    told, now_ms = story.tell_story(app, store, record), store.now_ms()
    text = story.show_value(app, record) if value else ""
    if as_json:
        fields = ("reserved", "delivered", "replaced", "on_stale")
        about = session.object_of(app, record, now_ms) | {
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            **{name: getattr(record, name) for name in fields},
            "message": record.message is not None,
            "steps": [name for name, _ in record.steps],
            "explanation": asdict(told),
            "elsewhere": [session.object_of(app, each, now_ms) for each in others],
        }
        write(True, about | ({"value": text} if value else {}), "")
    else:
        _write_story(told)
        words = [record.identity.key, "--task", finding.task_name(app, record.identity)]
        words += ["--scope", record.identity.scope] if record.identity.scope else []
        click.echo(f"\n  celery -A proj idempotency OPERATION {shlex.join(words)}")
        if value:
            click.echo(f"\nValue\n{text}")
        if others:
            click.echo("\nThe same key elsewhere")
            session.write_records(app, others, now_ms)


COMMANDS["explain"] = COMMANDS["show"]


def _find(
    app: Celery, text: str, *, task: str | None, scope: str | None, elsewhere: bool = True
) -> tuple[Record, Sequence[Record]]:
    """Return the record of a KEY, and those of the same key elsewhere.

    If there is none, or several, a message ends the command. ``elsewhere``: look for the others also if the key was
    found where it was expected.
    """
    if not text:
        raise click.UsageError("KEY is empty.")
    named = session.selection_of(app, task=task, scope=scope)
    store = get_store(app)
    meant = finding.find(store, text, named, session.known_namespaces(app))
    others: list[Record] = []
    # A view of a Django project has a namespace that is known once its module is imported.
    if not meant or (not scope and elsewhere and len(meant) == 1):
        keys = finding.spellings(meant[0].identity.key if meant else text)
        everywhere = replace(named, states=frozenset(), keys=frozenset(keys))
        page = finding.look(store, everywhere, seconds=SCAN_SECONDS)
        if page.cursor:
            note(f"Other scopes were searched in part: `list --key {text}` looks at every key.")
        known = {record.identity for record in meant}
        others = [each for each in page.records if each.identity not in known]
        if not meant and len(others) == 1:
            meant, others = finding.read_whole(store, [others[0].identity]), []
    if len(meant) == 1:
        return meant[0], others
    if several := [*meant, *others]:
        note(f"{text} is a key of {len(several)} records: select one by --task or --scope.")
        session.write_records(app, several, store.now_ms())
    else:
        where = f"{task or 'any task of this app'}{f', scope {scope}' if scope else ''}"
        _write_story(story.tell_absence(f"{text} in {where}"))
    raise Exit(FOUND)


def _write_story(told: story.Story) -> None:
    session.paragraph(told.headline, bold=True)
    for title, sentences in told.parts.items():
        click.echo(f"\n{title}")
        for each in sentences:
            session.paragraph(each, indent="  - ")


@command(
    "stats",
    "stats --hours 1",
    params=[
        Option(["--task"], metavar="NAME", help="Only the outcomes of this task."),
        session.number("hours", 24, "Outcomes of the last hours.", most=720),
    ],
)
def _stats(app: Celery, task: str | None, hours: int, as_json: bool) -> None:
    """Count records by state, and the outcomes of tasks in the last hours."""
    store = session.store_of(app)
    stats = store.stats()
    counts: dict[str, Counter[str]] = {}
    for each in store.counts(hours=hours):
        if each.task != SWEEP and task in (None, each.task):
            counts.setdefault(each.task, Counter())[each.outcome] += each.count
    names = ("live", "stale", "interrupted", "failed")
    numbers = {name: getattr(stats, name) for name in names}
    about = {
        **numbers,
        "last_sweep": story.iso(stats.swept_ms),
        "hours": hours,
        "outcomes": counts,
    }
    states = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
    _, sweeps = story.sweeps_of(app, store, stats)
    write(as_json, about, f"{states}. COMPLETED records are not counted. {sweeps}")
    if not counts:
        note(f"No outcomes in the last {hours} h.")
    elif not as_json:
        session.paragraph(f"In the last {hours} h:")
        rows = [
            [name, *(f"{sum(of[each] for each in series):,}" for series in story.SERIES.values())]
            for name, of in sorted(counts.items())
        ]
        session.table(["TASK", *map(str.upper, story.SERIES)], rows)


# -- operations --------------------------------------------------------------------------------------------------------

_REQUEST = [
    Option(["--reason"], default="", metavar="TEXT", help="The reason, for log, event and record."),
    Option(
        ["--who"],
        default=lambda: os.environ.get("USER") or f"uid {os.getuid()}",
        metavar="NAME",
        help="Who does it. Default: this machine's account.",
    ),
    Option(
        ["--force"], is_flag=True, help="Also change records with a live owner; needs a --reason."
    ),
    Option(["--yes", "-y"], is_flag=True, help="Do not ask."),
]

_ON_MANY = [
    Argument(["one"], required=False, metavar="[KEY]"),
    Option(
        ["--all", "every"], is_flag=True, help="Change all selected records instead of one KEY."
    ),
    *session.MANY,
    session.number("limit", 1000, "With --all: change at most this many.", most=100_000),
    Option(["--dry-run"], is_flag=True, help="With --all: only say what would be done."),
    *_REQUEST,
]

_ON_ONE = [
    Argument(["one"], metavar="KEY"),
    *session.ONE,
    Option(["--value"], required=True, metavar="JSON", help="What its run would have returned."),
    *_REQUEST,
]

_HELP = """{} the record of a KEY{}.

    It {}

    It asks first. A record that has changed since, or whose owner is live (unless forced), is left alone: exit code 1.
"""


def _operate(
    app: Celery,
    *,
    operation: Operation,
    one: str | None,
    task: str | None,
    scope: str | None,
    who: str,
    reason: str,
    force: bool,
    yes: bool,
    as_json: bool,
    every: bool = False,
    limit: int = 1,
    dry_run: bool = False,
    value: str = "",
    **given: Any,
) -> None:
    """Operate on one KEY, or on all that are selected."""
    if every is (one is not None) or (one is not None and (dry_run or any(given.values()))):
        raise click.UsageError("Give a KEY, with --task and --scope, or --all and a selection.")
    try:
        request = OperationRequest(operation, who=who, reason=reason, force=force)
        effect = ""
        if every:
            selection = session.selection_of(app, task=task, scope=scope, **given)
            page = finding.look(get_store(app), selection, enough=limit)
            found = [each.identity for each in page.records]
            if page.cursor or len(found) > limit:
                note(f"There may be more than {limit:,}: run it again for the rest.")
            # Lists leave out whether there is a message.
            records = finding.read_whole(get_store(app), found[:limit])
        else:
            records = [_find(app, one or "", task=task, scope=scope, elsewhere=False)[0]]
            told = story.tell_story(app, get_store(app), records[0])
            effect = told.choices.get(operation, "")
            note(told.headline)
        chosen = _preview(app, request, records, effect)
        if value and chosen:
            stored = story.value_from_json(app, chosen[0].identity, value)
            request = replace(request, value=stored)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if dry_run:
        return
    if not chosen:
        note("Nothing was done.")
        raise Exit(FOUND if records else 0)
    if not yes:
        click.confirm(f"{operation.capitalize()} {len(chosen):,}?", abort=True, err=True)
    _execute(app, request, chosen, left=len(records) - len(chosen), as_json=as_json)


def _preview(
    app: Celery, request: OperationRequest, records: Sequence[Record], effect: str
) -> list[Record]:
    """Say what would be done to which of the records, and return these; ``effect``: on a single one."""
    operation, now_ms = request.operation, get_store(app).now_ms()
    meaning, done = OPERATIONS[operation], ("apply", "held") if request.force else ("apply",)
    verdicts = [(verdict(app, operation, each, now_ms), each) for each in records]
    chosen = [each for found, each in verdicts if found in done]
    found = "1 record" if len(records) == 1 else f"{len(records):,} records"
    note(f"{found} found; {len(chosen):,} to be {meaning.done}.")
    if chosen:
        note(f"{operation} {effect or meaning.effect}")
        session.write_records(app, chosen[:5], now_ms, err=True)
    why = {"held": "its owner is live (--force, with a --reason).", "skip": meaning.refusal}
    for word, count in Counter(word for word, _ in verdicts if word not in done).items():
        note(f"{count:,} left alone: {why[word]}")
    return chosen


def _execute(
    app: Celery, request: OperationRequest, records: Sequence[Record], *, left: int, as_json: bool
) -> None:
    """Operate on one record after the other, and end with the exit code; ``left`` were left alone before."""
    counts: Counter[Outcome] = Counter()
    total, done = len(records), OPERATIONS[request.operation].done
    try:
        for record, outcome, text in operate_on_each(app, request, records):
            counts[outcome] += 1
            about = session.object_of(app, record, record.updated_ms)
            about |= {"operation": request.operation, "outcome": outcome.name.lower()}
            write(as_json, about, f"{record.identity}: {text}")
    except KeyboardInterrupt:
        note(f"\nInterrupted after {counts.total():,} of {total:,}: run it again for the rest.")
        raise Exit(FOUND) from None
    parts = [
        (counts[Outcome.DONE], done),
        (counts[Outcome.UNSENT], "queued and not published yet"),
        (counts[Outcome.CHANGED] + counts[Outcome.LIVE] + left, "left alone"),
        (counts[Outcome.UNKNOWN], "unknown: the store did not answer"),
        (total - counts.total(), "not tried: run it again"),
    ]
    note(", ".join(f"{number:,} {text}" for number, text in parts if number) + ".")
    if counts[Outcome.UNKNOWN]:
        raise Exit(UNREACHABLE)
    if left or counts.total() > counts[Outcome.DONE]:
        raise Exit(FOUND)


for _operation, _meaning in OPERATIONS.items():
    _example = f"{_operation} order-17 --task shop.charge --reason 'ticket 4711'"
    _params, _also, _examples = _ON_ONE, "", [f"{_example} --value '17.50'"]
    if _operation in ON_MANY:
        _all = f"{_operation} --all --task shop.charge --state stale --before 10m"
        _params, _also, _examples = _ON_MANY, ", or all that are selected", [_example, _all]
    _help = _HELP.format(_operation.capitalize(), _also, _meaning.effect)
    _made = command(_operation, *_examples, params=_params, text=_help)
    _made(partial(_operate, operation=_operation))


# -- upkeep ------------------------------------------------------------------------------------------------------------

_LIMIT = session.number("limit", 10_000, "Records in one step.")


@command("sweep", "sweep", params=[_LIMIT])
def _sweep(app: Celery, limit: int, as_json: bool) -> None:
    """Do what beat asks for every idempotency_sweep_interval, once, now.

    Stale records are interrupted, failed or requeued, as their tasks say; records past their retention are deleted; the
    outbox is sent. Safe beside other sweeps.
    """
    session.store_of(app)
    counts = sweep(app, limit=limit)
    write(as_json, counts, ", ".join(f"{name} {value}" for name, value in counts.items()) + ".")
    if counts["more"]:
        note("There is more to do: run it again.")


@command("prune", "prune", params=[_LIMIT])
def _prune(app: Celery, limit: int, as_json: bool) -> None:
    """Delete all records that are past their retention, in steps of --limit.

    Redis expires records; there this deletes only their entries in the indexes.
    """
    store, pruned = session.store_of(app), 0
    while (count := store.prune(limit=limit)) > 0:
        pruned += count
    write(as_json, {"pruned": pruned}, f"{pruned:,} deleted.")


@command(
    "check",
    "check",
    "check --health",
    params=[Option(["--health"], is_flag=True, help="Is all well right now? For orchestrators.")],
)
def _check(app: Celery, health: bool, as_json: bool) -> None:
    """Check how the app and its store are set up.

    Each finding has an id, what can go wrong, and what to set. Exit code 1 if there is any, 3 if the store does not
    answer.

    --health checks no settings, but: does the store answer, did a sweep end within three intervals, has no message
    waited in the outbox for over a minute? It prints JSON.
    """
    if health:
        alias, waits = (store := session.store_of(app)).outbox_alias, None
        if alias is not None:
            outbox = import_module("celery_idempotent.django.outbox")
            waits = outbox.oldest_ms(using=alias)
        about = story.check_health(app, store, outbox_ms=waits)
        write(True, about, "")
        raise Exit(0 if about["well"] else FOUND)
    found = check(app)
    for each in found:
        about = asdict(each) | {"level": each.level}
        write(as_json, about, f"{each.problem} {each.hint}", indent=f"{each.id}  ")
    if not found:
        note("Nothing found.")
    codes = {UNREACHABLE if each.id == "E006" else FOUND for each in found}
    raise Exit(max(codes, default=0))
