"""The common ground of the commands: their app, their options, their output, exit codes for scripts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click import Option

from celery_idempotent.celery import finding
from celery_idempotent.celery.definition import definitions, load_tasks
from celery_idempotent.celery.story import ago, iso
from celery_idempotent.http.options import HTTP_NAMESPACE
from celery_idempotent.records import Record, Selection
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery import Celery

#: Exit codes beside click's 2 for wrong usage: something was found, refused or left alone; the store did not answer, so
#: that nobody knows whether it was done.
FOUND, UNREACHABLE = 1, 3

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_LENGTH = re.compile(r"([0-9]{1,9})\s*(s|min|m|h|d)", re.ASCII)

#: By their names, in the order of the help.
COMMANDS: dict[str, click.Command] = {}


def command(
    name: str, *examples: str, params: Sequence[click.Parameter] = (), text: str = ""
) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function of the app that ``-A`` names; ``text``: its help, by default the docstring."""
    shown = "".join(f"\n  celery -A proj idempotency {each}" for each in examples)
    as_json = Option(["--json", "as_json"], is_flag=True, help="Print one JSON object per line.")

    def decorate(function: Callable[..., None]) -> None:
        @click.pass_context
        def run(ctx: click.Context, /, **given: object) -> None:
            function(ctx.obj.app, **given)

        COMMANDS[name] = click.Command(
            name,
            callback=run,
            params=[*params, as_json],
            help=text or function.__doc__,
            epilog=f"\b\nExamples:{shown}",
        )

    return decorate


def store_of(app: Celery) -> Store:
    """Return the app's store, once its tasks are imported."""
    try:
        load_tasks(app)
    except ImportError as error:
        raise click.UsageError(f"the app's tasks cannot be imported: {error}") from error
    return get_store(app)


# -- which records -----------------------------------------------------------------------------------------------------


def _milliseconds(text: str) -> int:
    """Read ``90s``, ``10m``, ``2h`` or ``1d``."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a length of time: 90s, 10m, 2h or 1d.")
    return int(found[1]) * _UNITS[found[2]] * 1000


_STATES = click.Choice(list(finding.STATES), case_sensitive=False)
_STATE = "Only this state. Default: any with --key or --scope, else all but COMPLETED."
_SCOPE = "Only this scope; `user 17` for requests of that user."

#: Which record a KEY is about.
ONE = [
    Option(["--task"], metavar="NAME", help="Only this task (or namespace)."),
    Option(["--scope"], metavar="SCOPE", help=_SCOPE),
]

#: Which of all records are selected.
MANY = [
    *ONE,
    Option(["--key"], metavar="KEY", help="Only this key, in every scope."),
    Option(["--state"], type=_STATES, help=_STATE),
    Option(["--since"], type=_milliseconds, metavar="TIME", help="Changed within 10m, 2h, 1d."),
    Option(["--before"], type=_milliseconds, metavar="TIME", help="Not changed for 10m, 2h, 1d."),
]


def number(name: str, default: int, text: str, *, most: int | None = None) -> Option:
    """Return an option that takes a number."""
    kind = click.IntRange(1, most)
    return Option([f"--{name}"], type=kind, default=default, show_default=True, help=text)


def known_namespaces(app: Celery) -> list[str]:
    """Return the namespaces of the app's tasks, and that of views."""
    ours = sorted(each.identifier.namespace for each in definitions(app, load=True))
    return [*ours, HTTP_NAMESPACE]


def selection_of(
    app: Celery, *, since: int | None = None, before: int | None = None, **given: str | None
) -> Selection:
    """Return the selection that the options make."""
    now_ms = store_of(app).now_ms()
    since_ms = None if since is None else now_ms - since
    before_ms = None if before is None else now_ms - before
    found = finding.select(app, given, since_ms=since_ms, before_ms=before_ms)
    if found.namespace and found.namespace not in known_namespaces(app):
        note(f"No task of this app is called {given['task']}: it is taken as a namespace.")
    if given.get("state") or found.keys or found.scopes:
        return found
    return replace(found, states=finding.UNFINISHED_AND_FAILED)


# -- output: tables for people, tabs for pipes, JSON lines for programs ------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Write a table: in columns on a terminal, with tabs into a pipe."""
    lines = [[cell or "-" for cell in line] for line in (head, *rows)]
    widths = [
        max(map(len, column)) if sys.stdout.isatty() else 0 for column in zip(*lines, strict=True)
    ]
    between = "  " if any(widths) else "\t"
    for line in lines:
        click.echo(between.join(map(str.ljust, line, widths)).rstrip(), err=err)


def paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal, in a pipe on one line."""
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 10_000
    click.secho(click.wrap_text(text, width, indent, " " * len(indent)), bold=bold)


def note(text: str) -> None:
    """Write a message for people to standard error, where a pipe does not see it."""
    click.echo(text, err=True)


def write(as_json: bool, item: Mapping[str, object], text: str, *, indent: str = "") -> None:
    """Write one object on a line, or its text for people."""
    if as_json:
        click.echo(json.dumps(item, ensure_ascii=False))
    else:
        paragraph(text, indent=indent)


def write_records(
    app: Celery, records: Sequence[Record], now_ms: int, *, as_json: bool = False, err: bool = False
) -> None:
    """Write records as a table, or as JSON lines."""
    rows = []
    for record in records:
        about = object_of(app, record, now_ms)
        if as_json:
            write(True, about, "")
        identity, state = record.identity, record.state.value
        state += ", stale" if about["stale"] else ""
        cells = [identity.key, str(about["task"]), identity.scope, state]
        cells += [ago(record.updated_ms, now_ms), str(record.crashes or "")]
        rows.append([*cells, record.worker.partition("/")[0]])
    if not as_json:
        head = ("KEY", "TASK", "SCOPE", "STATE", "CHANGED", "CRASHES", "WORKER")
        table(head, rows, err=err)


def object_of(app: Celery, record: Record, now_ms: int) -> dict[str, object]:
    """Return a record for programs; times are those of the store's clock."""
    identity = record.identity
    same = ("token", "task_id", "worker", "crashes", "attempts")
    return {
        "key": identity.key,
        "task": finding.task_name(app, identity),
        "scope": identity.scope,
        "state": record.state.value,
        "stale": record.stale(now_ms),
        "namespace": identity.namespace,
        **{name: getattr(record, name) for name in same},
        "created": iso(record.created_ms),
        "updated": iso(record.updated_ms),
        "deadline": iso(record.deadline_ms),
    }
