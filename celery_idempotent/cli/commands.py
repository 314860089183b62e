"""The commands: to look at records, to operate on one or on all that are selected, and to maintain the store.

The steps of an operation, which changes a record only if its token and state are still as they were found::

    find ─ sort: apply, held, skip ─ preview ─ ask ─ change each ─ summary, exit code
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from celery.utils.text import pluralize
from click import Argument, Option
from click.exceptions import Exit

from celery_idempotent.celery import finding, operations, story
from celery_idempotent.celery.checks import check
from celery_idempotent.celery.definition import load_tasks
from celery_idempotent.celery.operations import OPERATIONS, Operation, OperationRequest, Outcome
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Record, Selection
from celery_idempotent.stores import get_store
from celery_idempotent.stores.fields import Unreadable

if TYPE_CHECKING:
    from celery import Celery

#: Exit codes beside click's 2 for wrong usage: something was found, refused or left alone; the store did not answer.
FOUND, UNREACHABLE = 1, 3

#: The seconds of a search for the same key in other scopes.
SCAN_SECONDS = 10.0

#: By their names, in the order of the help.
COMMANDS: dict[str, click.Command] = {}

#: Writes a message for people to standard error, where a pipe does not see it.
_note = partial(click.echo, err=True)

_flag = partial(Option, is_flag=True)
_number = partial(Option, type=click.IntRange(1), show_default=True)


#: Which record a KEY is about.
_ONE = [
    Option(["--task"], metavar="NAME", help="Only this task (or namespace)."),
    Option(["--scope"], metavar="SCOPE", help='Only this scope, such as ["user", 17].'),
]

#: Which of all records are selected.
_MANY = [
    *_ONE,
    Option(["--key"], metavar="KEY", help="Only this key, in every scope."),
    Option(
        ["--state"],
        type=click.Choice([*finding.STATES], case_sensitive=False),
        help="Only this state. Default: any with --key or --scope, else all but COMPLETED.",
    ),
    Option(["--since"], metavar="TIME", help="Changed within 10m, 2h, 1d."),
    Option(["--before"], metavar="TIME", help="Not changed for 10m, 2h, 1d."),
    Option(["--error"], metavar="CLASS", help="Only FAILED ones with an error of this class."),
]


def _command(
    *examples: str, params: Sequence[click.Parameter]
) -> Callable[[Callable[..., None]], None]:
    """Make a function of an app a command, named by the first word of its examples."""
    name, shown = examples[0].split()[0], "\n  celery -A proj idempotency ".join(("", *examples))
    as_json = _flag(["--json"], help="Print one JSON object per line.")

    def decorate(function: Callable[..., None]) -> None:
        @click.pass_obj
        def run(obj: Any, /, *, json: bool, **given: object) -> None:  # noqa: ARG001  see _write()
            if name != "check":  # which reports what cannot be imported
                load_tasks(obj.app)
            function(obj.app, **given)

        COMMANDS[name] = click.Command(
            name,
            callback=run,
            params=[*params, as_json],
            help=function.__doc__,
            epilog=f"\b\nExamples:{shown}",
        )

    return decorate


def _paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal, in a pipe on one line."""
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 10_000
    click.secho(click.wrap_text(text, width, indent, " " * len(indent)), bold=bold)


def _wants_json() -> bool:
    return bool(click.get_current_context().params["json"])


def _write(item: Mapping[str, object], text: str = "", *, indent: str = "") -> None:
    """Write an object on a line, or, without ``--json``, its text for people."""
    if _wants_json() or not text:
        click.echo(json.dumps(item, ensure_ascii=False))
    else:
        _paragraph(text, indent=indent)


def _write_story(told: story.Story) -> None:
    _paragraph(told.headline, bold=True)
    for title, sentences in told.parts.items():
        click.echo(f"\n{title}")
        for each in sentences:
            _paragraph(each, indent="  - ")


def _write_table(rows: Iterable[Mapping[str, object]], *, err: bool = False) -> None:
    """Write a table, if it has a row: in columns that fit a terminal, with tabs into a pipe."""

    def read() -> Iterator[list[str]]:
        for number, row in enumerate(rows):
            if not number:
                yield [name.upper() for name in row]
            yield [str(each or "-") for each in row.values()]

    lines = read()
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("\t".join(line), err=err)
        return
    first = list(islice(lines, 500))  # which decide the widths; of the others none is kept
    widths = [max(map(len, column)) for column in zip(*first, strict=True)]
    room = shutil.get_terminal_size((80, 24)).columns
    for line in chain(first, lines):
        text = "  ".join(map(str.ljust, line, widths)).rstrip()
        click.echo(text if len(text) <= room else f"{text[: room - 1]}…", err=err)


def _write_records(
    app: Celery,
    records: Iterable[Record],
    now_ms: int,
    columns: Sequence[str] = (),
    *,
    err: bool = False,
) -> None:
    """Write records while they are found, ``err``: for people alone."""

    def chosen(record: Record) -> Mapping[str, object]:
        cells = story.cells(app, record, now_ms)
        if not columns:
            return cells
        known = {**_object_of(app, record, now_ms), **cells}
        if unknown := [each for each in columns if each not in known]:
            raise click.UsageError(f"{unknown[0]} is no column: choose from {', '.join(known)}.")
        return {each: known[each] for each in columns}

    if err or not _wants_json():
        _write_table(map(chosen, records), err=err)
        return
    for each in records:
        _write(_object_of(app, each, now_ms))


def _object_of(app: Celery, record: Record, now_ms: int) -> dict[str, object]:
    """Return a record for programs; times are those of the store's clock."""
    identity = record.identity
    same = ["token", "task_id", "worker", "crashes", "attempts", "note", "on_stale"]
    same += ["reserved", "delivered", "replaced"]
    return {
        "key": identity.key,
        "task": finding.task_name(app, identity),
        "scope": identity.scope,
        "state": record.state.value,
        "stale": record.stale(now_ms),
        "namespace": identity.namespace,
        **{name: getattr(record, name) for name in same},
        "error": record.error.partition(":")[0],  # its message may be private
        "created": story.iso(record.created_ms),
        "updated": story.iso(record.updated_ms),
        "deadline": story.iso(record.deadline_ms),
    }


def _selection(app: Celery, **given: str | None) -> Selection:
    """Return the selection that the options describe."""
    found = finding.select(app, get_store(app), given)
    if found.namespace and found.namespace not in finding.namespaces(app):
        _note(f"No task of this app is called {given['task']}: it is taken as a namespace.")
    return found


def _selected(app: Celery, limit: int, **given: Any) -> Iterator[Record]:
    """Yield up to ``limit`` of the selected records, without the fields that lists leave out."""
    size = min(limit, finding.LOOK_AT)
    pages = finding.pages(get_store(app), _selection(app, **given), limit=size)
    for at, each in enumerate(chain.from_iterable(page.records for page in pages), 1):
        yield each
        if at == limit:
            _note(f"Only the first {limit:,}: there may be more with a larger --limit.")
            return


@_command(
    "list --state stale",
    "list --task shop.charge --state FAILED --since 10m",
    "list --key order-17 --columns key,task_id,note",
    params=[
        *_MANY,
        _number(["--limit"], default=50, help="At most this many records."),
        Option(
            ["--columns"], metavar="NAMES", default="", help="These; others are those of --json."
        ),
        _flag(["--watch"], help="List them anew every two seconds, until Ctrl+C."),
    ],
)
def _list(app: Celery, limit: int, columns: str, watch: bool, **given: Any) -> None:
    """List records: the unfinished and the failed ones, or those of a --state.

    COMPLETED records have no index: to list them (--key, --scope, --state any), every key is read until --limit is
    reached. A terminal's edge cuts the lines; a pipe gets whole ones, with tabs between.
    """
    with suppress(KeyboardInterrupt):
        while True:
            if watch and sys.stdout.isatty():
                click.clear()
                limit = min(limit, max(shutil.get_terminal_size().lines - 4, 1))
            found = _selected(app, limit, **given)
            if first := next(found, None):
                names = columns.split(",") if columns else []
                _write_records(app, chain([first], found), get_store(app).now_ms(), names)
            else:
                hint = "" if given["state"] else " For COMPLETED ones give --state COMPLETED."
                _note(f"No such records.{hint}")
            if not watch:
                return
            time.sleep(2.0)


@_command(
    "show order-17 --task shop.charge",
    "explain 7d0b0a5e-5d3c-4f4e-9c0e-1f6f5a4f2c11",
    params=[
        Argument(["key"]),
        *_ONE,
        _flag(["--value"], help="Add the result or error, which may be private."),
    ],
)
def _show(app: Celery, key: str, value: bool, **given: Any) -> None:
    """Explain the record of a KEY: what happened, what happens next, what can be done.

    Without --scope, every scope is searched for KEY, and then for a task with this id, for ten seconds each at most.
    --json has every field of the record.
    """
    record, others = _find(app, key, **given)
    store = get_store(app)
    told, now_ms = story.tell_story(app, store, record), store.now_ms()
    text = story.show_value(app, record) if value else ""
    if _wants_json():
        about = _object_of(app, record, now_ms) | {
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            "message": record.message is not None,
            "steps": [name for name, _ in record.steps],
            **{name: getattr(record, name) for name in ("copies", "swept", "uncommitted")},
            "explanation": asdict(told),
            "elsewhere": [_object_of(app, each, now_ms) for each in others],
        }
        _write(about | ({"value": text} if value else {}))
        return
    _write_story(told)
    words = [record.identity.key, "--task", finding.task_name(app, record.identity)]
    words += ["--scope", record.identity.scope] if record.identity.scope else []
    click.echo(f"\n  celery -A proj idempotency OPERATION {shlex.join(words)}")
    if value:
        click.echo(f"\nValue\n{text}")
    if others:
        click.echo("\nThe same key elsewhere")
        _write_records(app, others, now_ms)


COMMANDS["explain"] = COMMANDS["show"]


def _find(
    app: Celery, text: str, *, task: str | None, scope: str | None, elsewhere: bool = True
) -> tuple[Record, Sequence[Record]]:
    """Return the record of a KEY, and those of the same key in other scopes and tasks, or end with a message.

    ``elsewhere``: search the others even if a task has the key without a scope.
    """
    if not text:
        raise click.UsageError("KEY is empty.")
    named, store = _selection(app, task=task, scope=scope, key=text), get_store(app)
    meant = finding.find(store, text, named, finding.namespaces(app))
    others: list[Record] = []
    # Every namespace: that of a Django view is known only once its module is imported.
    if not meant or (not scope and elsewhere and len(meant) == 1):
        known = {record.identity for record in meant}
        keys = named.keys | {identity.key for identity in known}
        page = finding.look(store, replace(named, keys=keys), seconds=SCAN_SECONDS)
        if page.cursor:
            _note(f"Other scopes were searched in part: `list --key {text}` looks at every key.")
        others = [each for each in page.records if each.identity not in known]
        if not meant and len(others) == 1:
            meant, others = finding.read_whole(store, [others[0].identity]), []
    if not meant and not others:
        meant = finding.find_task(store, text, named, SCAN_SECONDS)
    if len(meant) == 1:
        return meant[0], others
    if several := [*meant, *others]:
        _note(f"{text} is a key of {len(several)} records: select one by --task or --scope.")
        _write_records(app, several, store.now_ms())
    else:
        where = f" in {task or 'any task of this app'}{f', scope {scope}' if scope else ''}"
        _write_story(story.tell_absence(app, text, where))
    raise Exit(FOUND)


@_command(
    "stats --hours 1",
    params=[
        Option(["--task"], metavar="NAME", help="Only the outcomes of this task."),
        _number(["--hours"], default=24, type=click.IntRange(1, 720), help="How many hours back."),
    ],
)
def _stats(app: Celery, task: str | None, hours: int) -> None:
    """Count records by state, and the outcomes of tasks in the last hours."""
    store = get_store(app)
    stats = store.stats()
    counts: dict[str, Counter[str]] = {}
    for each in store.counts(hours=hours):
        if each.task != SWEEP and task in (None, each.task):
            counts.setdefault(each.task, Counter())[each.outcome] += each.count
    numbers = {name: getattr(stats, name) for name in ("live", "stale", "interrupted", "failed")}
    states = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
    about = {**numbers, "last_sweep": story.iso(stats.swept_ms), "hours": hours, "outcomes": counts}
    about |= {"outbox": stats.outbox, "outbox_ms": stats.outbox_ms}
    sweeps = story.sweeps_of(app, store, stats)[1]
    if stats.outbox:
        waits = story.time_in_words(stats.outbox_ms or 0)
        sweeps += f" {stats.outbox:,} in the outbox, the oldest for {waits}."
    _write(about, f"{states}. COMPLETED records are not counted. {sweeps}")
    if not counts:
        _note(f"No outcomes in the last {hours} h.")
    elif not _wants_json():
        _paragraph(f"In the last {hours} h:")
        _write_table(map(_row_of, sorted(counts.items())))


def _row_of(counted: tuple[str, Counter[str]]) -> dict[str, object]:
    """Return the sums of a task's outcomes by series; trouble and errors by name."""
    task, of = counted
    sums = {name: f"{sum(of[each] for each in some):,}" for name, some in story.SERIES.items()}
    named = [each for each in of if ":" in each or each in story.SERIES["trouble"]]
    return {"task": task, **sums, "trouble": ", ".join(f"{of[each]:,} {each}" for each in named)}


_WHO = Option(
    ["--who"],
    default=lambda: os.environ.get("USER") or f"uid {os.getuid()}",
    metavar="NAME",
    help="Who does it. Default: this machine's account.",
)

_ON_ONE = [
    Argument(["one"], required=False, metavar="KEY"),
    *_ONE,
    Option(["--reason"], default="", metavar="TEXT", help="Why: for log, event and record."),
    _WHO,
    _flag(["--force"], help="Also with a live owner, or to replace an end; needs a --reason."),
    _flag(["--yes", "-y"], help="Do not ask."),
]

_ON_MANY = [
    _flag(["--all"], help="Change all selected records instead of one KEY."),
    *_MANY[len(_ONE) :],
    _number(["--limit"], default=1000, help="With --all: change at most this many."),
    _flag(["--dry-run"], help="With --all: only say what would be done."),
]

_VALUE = Option(
    ["--value"], required=True, metavar="JSON", help="What the run would have returned."
)

_HELP = """{} the record of a KEY{}.

    Effect: {}

    It asks first. Exit code 1: a record was left alone, because it has changed since or has a live owner (see --force).
"""


def _operate(app: Celery, operation: Operation, **options: Any) -> None:
    """Operate on one KEY, or on all that are selected."""
    given = SimpleNamespace(**{"all": False, "dry_run": False, "value": ""} | options)
    narrow = {name: options.get(name) for name in ("key", "state", "since", "before", "error")}
    where = {"task": given.task, "scope": given.scope}
    is_one = given.one is not None
    if given.all is is_one or (is_one and (given.dry_run or any(narrow.values()))):
        raise click.UsageError("Give a KEY, with --task and --scope, or --all and a selection.")
    if given.all and given.yes and not any((narrow | where).values()):
        raise click.UsageError("With --yes nobody is asked: give --all a selection.")
    try:
        request = OperationRequest(operation, who=given.who, reason=given.reason, force=given.force)
        store = get_store(app)
        if is_one:
            records = [_find(app, given.one, **where, elsewhere=False)[0]]
            _note(story.tell_story(app, store, records[0]).headline)
            request.check(records[0])
        else:
            found = _selected(app, given.limit, **where, **narrow)
            records = finding.read_whole(store, [each.identity for each in found])
        chosen = _preview(app, request, records)
        if given.value and chosen:
            stored = story.value_from_json(app, chosen[0].identity, given.value)
            request = replace(request, value=stored)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except Unreadable as error:
        if not (is_one and given.force and operation == "forget"):
            raise
        _note(f"{error}.")
        if not given.yes:
            click.confirm("Forget it?", abort=True, err=True)
        done = operations.operate_or_raise(app, error.identity, request)
        raise Exit(0 if done else FOUND) from None
    if given.dry_run:
        return
    if not chosen:
        _note("Nothing was done.")
        raise Exit(FOUND if records else 0)
    if not given.yes:
        click.confirm(f"{operation.capitalize()} {len(chosen):,}?", abort=True, err=True)
    _execute(app, request, chosen, left=len(records) - len(chosen))


def _preview(app: Celery, request: OperationRequest, records: Sequence[Record]) -> list[Record]:
    """Write what would be done to which of the records, with the risks, and return these."""
    operation, now_ms = request.operation, get_store(app).now_ms()
    meaning, done = OPERATIONS[operation], ("apply", "held") if request.force else ("apply",)
    verdicts = [(operations.verdict(app, operation, each, now_ms), each) for each in records]
    chosen = [each for found, each in verdicts if found in done]
    found = pluralize(len(records), "record")
    _note(f"{len(records):,} {found} found; {len(chosen):,} to be {meaning.done}.")
    if chosen:
        _note(f"{operation} {meaning.effect}")
        for risk in story.risks(app, operation, chosen, now_ms):
            _note(f"  {risk}")
        _write_records(app, chosen[:5], now_ms, err=True)
    why = {"held": "its owner is live (--force, with a --reason).", "skip": meaning.refusal}
    for word, count in Counter(word for word, _ in verdicts if word not in done).items():
        _note(f"{count:,} left alone: {why[word]}")
    return chosen


def _execute(
    app: Celery, request: OperationRequest, records: Sequence[Record], *, left: int
) -> None:
    """Change one record after the other, and end with the exit code; ``left`` were left alone before."""
    counts: Counter[Outcome] = Counter()
    total, done = len(records), OPERATIONS[request.operation].done
    for record, outcome, text in operations.operate_on_each(app, request, records):
        counts[outcome] += 1
        about = _object_of(app, record, record.updated_ms)
        about |= {"operation": request.operation, "outcome": outcome.name.lower()}
        _write(about, f"{record.identity}: {text}")
    parts = [
        (counts[Outcome.DONE], done),
        (counts[Outcome.UNSENT], "queued and not published yet"),
        (counts[Outcome.CHANGED] + counts[Outcome.LIVE] + left, "left alone"),
        (counts[Outcome.UNKNOWN], "unknown: the store did not answer"),
        (total - counts.total(), "not tried: run it again"),
    ]
    _note(", ".join(f"{number:,} {text}" for number, text in parts if number) + ".")
    if counts[Outcome.UNKNOWN]:
        raise Exit(UNREACHABLE)
    if left or counts.total() > counts[Outcome.DONE]:
        raise Exit(FOUND)


for _operation, _meaning in OPERATIONS.items():
    _example = f"{_operation} order-17 --task shop.charge --reason 'ticket 4711'"
    _params, _also, _examples = [_VALUE], "", [f"{_example} --value '17.50'"]
    if _operation in operations.ON_MANY:
        _all = f"{_operation} --all --task shop.charge --state stale --before 10m"
        _params, _also, _examples = _ON_MANY, ", or all that are selected", [_example, _all]
    _made = partial(_operate, operation=_operation)
    _made.__doc__ = _HELP.format(_operation.capitalize(), _also, _meaning.effect)
    _command(*_examples, params=[*_ON_ONE, *_params])(_made)


_LIMIT = _number(["--limit"], default=10_000, help="At most this many records in one step.")


@_command(
    "sweep --now",
    params=[_LIMIT, _flag(["--now"], help="Send all of the outbox, also what failed just before.")],
)
def _sweep(app: Celery, limit: int, now: bool) -> None:
    """Run one sweep now, as beat does every idempotency_sweep_interval.

    Stale records are interrupted, failed or requeued, as their tasks say; records past their retention are deleted; the
    outbox is sent, and why a message stays is written to standard error. Other sweeps may run at the same time.
    """
    if now and (alias := get_store(app).outbox_alias):
        import_module("celery_idempotent.django.outbox").wake(app, using=alias)
    counts = sweep(app, limit=limit)
    _write(counts, ", ".join(f"{name} {value}" for name, value in counts.items()) + ".")
    if counts["more"]:
        _note("There is more to do: run it again.")


@_command("prune", params=[_LIMIT])
def _prune(app: Celery, limit: int) -> None:
    """Delete all records that are past their retention, in steps of --limit.

    Redis expires records itself: there only their entries in the indexes are deleted.
    """
    store, pruned = get_store(app), 0
    while (count := store.prune(limit=limit)) > 0:
        pruned += count
    _write({"pruned": pruned}, f"{pruned:,} deleted.")


@_command(
    "check",
    "check --health",
    params=[_flag(["--health"], help="Check the health instead, as orchestrators do.")],
)
def _check(app: Celery, health: bool) -> None:
    """Check the settings of the app and of its store.

    Each finding has an id, what can go wrong, and what to set. The memory and the eviction policy of the servers come
    last. Exit code 1: any finding; 3: the store does not answer.

    --health checks instead that the store answers and takes writes, that a sweep ended within the last three intervals,
    and that no message has waited in the outbox for over a minute. It prints JSON.
    """
    if health:
        load_tasks(app)
        store = get_store(app)
        answer = store.health()
        _write(about := story.check_health(app, store, answer))
        if answer.error:
            _note(f"the store is {answer.problem}: {answer.error}")
            raise Exit(UNREACHABLE)
        raise Exit(0 if about["well"] else FOUND)
    found = check(app)
    for each in found:
        about = asdict(each) | {"level": each.level}
        _write(about, f"{each.problem} {each.hint}", indent=f"{each.id}  ")
    if not found:
        _note("Nothing found.")
    codes = {UNREACHABLE if each.id == "E006" else FOUND for each in found}
    with suppress(IdempotencyError):  # there is no store, or the user may not ask
        for server in get_store(app).facts():  # which a full one tells as well
            used = f"{server.memory} used (0B: no limit), maxmemory-policy {server.eviction}"
            _note(f"{server.kind} {server.version}: {used}.")
    raise Exit(max(codes, default=0))


@_command(
    "web --port 8600",
    params=[
        _number(["--port"], default=8600, type=click.IntRange(0, 65535), help="0: any free one."),
        _flag(["--allow-operations"], help="Also operate on records, with --who in their notes."),
        _flag(["--allow-results"], help="Also show results and errors, which may be private."),
        _WHO,
    ],
)
def _web(app: Celery, **how: Any) -> None:
    """Serve the pages of the Django admin for an app without Django, until Ctrl+C.

    Whoever has the address that it prints sees all records; by default without results and errors, and only to read.
    """
    try:
        web = import_module("celery_idempotent.django.web")
    except ImportError as error:
        problem = f"{error}: the pages need pip install 'celery-idempotent[django]'"
        raise click.UsageError(problem) from error
    server, address = web.server_of(app, **how)
    _write({"address": address}, address)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
