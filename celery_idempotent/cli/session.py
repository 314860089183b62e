"""What several commands have: their app, options, output, and exit codes that scripts can use."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from click import Option

from celery_idempotent.celery import finding
from celery_idempotent.celery.definition import definitions, load_tasks
from celery_idempotent.celery.story import ago, iso
from celery_idempotent.records import Record, Selection
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery import Celery

#: Exit codes beside click's 2 for wrong usage: something was found, refused or left alone; the store did not answer, so
#: that nobody knows whether it was done.
FOUND, UNREACHABLE = 1, 3

#: So many characters of a cell are shown on a terminal.
_WIDEST = 40

#: The columns of a table of records; the narrow ones come first.
_COLUMNS = ("KEY", "TASK", "SCOPE", "STATE", "CHANGED", "CRASHES", "TASK ID", "WORKER")

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_LENGTH = re.compile(r"([0-9]{1,9})\s*(s|min|m|h|d)", re.ASCII)

#: By their names, in the order in which they are made.
COMMANDS: dict[str, click.Command] = {}


def command(
    name: str, *examples: str, params: Sequence[click.Parameter] = ()
) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function of the app that ``-A`` names."""

    def decorate(function: Callable[..., None]) -> None:
        @click.pass_context
        @wraps(function)
        def run(ctx: click.Context, /, **given: object) -> None:
            function(ctx.obj.app, **given)

        shown = "".join(f"\n  celery -A proj idempotency {each}" for each in examples)
        every = [
            *params,
            Option(["--json", "as_json"], is_flag=True, help="One JSON object a line."),
        ]
        made = click.command(name, params=every, epilog=f"\b\nExamples:{shown}")(run)
        COMMANDS[name] = made

    return decorate


def store_of(app: Celery) -> Store:
    """Return the app's store, once its tasks are imported."""
    try:
        load_tasks(app)
    except ImportError as error:
        raise click.UsageError(f"the app's tasks cannot be imported: {error}") from error
    return get_store(app)


def django_part(module: str) -> Any:
    """Return a module of ours that only a Django project with our app can use, ``None`` in any other."""
    apps = getattr(sys.modules.get("django.apps"), "apps", None)
    if apps is None or not apps.ready or not apps.is_installed("celery_idempotent.django"):
        return None
    return import_module(f"celery_idempotent.django.{module}")


# -- which records -----------------------------------------------------------------------------------------------------


def _milliseconds(text: str) -> int:
    """Read ``90s``, ``10m``, ``2h`` or ``1d``."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no length of time: 90s, 10m, 2h or 1d.")
    return int(found[1]) * _UNITS[found[2]] * 1000


_STATES = click.Choice(list(finding.STATES), case_sensitive=False)
_STATE = "Only this state. Default: any with --key or --scope, else all but COMPLETED."
_SCOPE = "Only this scope; `user 17` for what that user sent over HTTP."

#: Which record a KEY is about.
ONE = [
    Option(["--task"], metavar="NAME", help="Only this task (or namespace)."),
    Option(["--scope"], metavar="SCOPE", help=_SCOPE),
]

#: Which of all records are meant.
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
    """Return what keys may be for: the app's tasks, and the views of its Django project."""
    views = django_part("http.views")
    ours = sorted(each.identifier.namespace for each in definitions(app, load=True))
    return list(dict.fromkeys([*ours, *(views.view_namespaces() if views else ())]))


def selection_of(
    app: Celery, *, since: int | None = None, before: int | None = None, **given: str | None
) -> Selection:
    """Return the selection that the options make."""
    store = store_of(app)
    now_ms = store.now_ms()
    found = finding.select(
        app,
        given,
        since_ms=None if since is None else now_ms - since,
        before_ms=None if before is None else now_ms - before,
    )
    if found.namespace and found.namespace not in known_namespaces(app):
        note(f"No task of this app is called {given['task']}: records of that namespace are meant.")
    if given.get("state") or found.keys or found.scopes:
        return found
    return replace(found, states=finding.UNFINISHED_AND_FAILED)


# -- output: tables for people, tabs for pipes, JSON lines for programs ------------------------------------------------


def on_terminal() -> bool:
    """Does a person read the output, or a program?"""
    return sys.stdout.isatty()


def width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((80, 24)).columns


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, least: int = 99, err: bool = False
) -> None:
    """Write a table, into a pipe whole and with tabs.

    On a terminal cells are cut, empty columns are left out, and where it is too narrow, so are the last, down to
    ``least`` columns.
    """
    if not on_terminal():
        for row in [head, *rows]:
            click.echo("\t".join(cell or "-" for cell in row), err=err)
        return
    columns = [
        [cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in column]
        for column in zip(head, *rows, strict=True)
        if any(column[1:])
    ]
    widths = [max(map(len, column)) for column in columns]
    while len(widths) > least and sum(widths) + 2 * len(widths) > width():
        widths.pop()
    for line in zip(*columns[: len(widths)], strict=True):
        cells = map(str.ljust, line, widths)
        click.echo("  ".join(cells).rstrip(), err=err)


def paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal, in a pipe on one line."""
    lines = textwrap.wrap(
        text,
        min(width(), 120) if on_terminal() else 10_000,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.secho("\n".join(lines), bold=bold)


def note(text: str) -> None:
    """Write a message for people to standard error, where a pipe does not see it."""
    click.echo(text, err=True)


def write(as_json: bool, item: Mapping[str, object], text: str, *, indent: str = "") -> None:
    """Write one object, on a line of its own, or what it says for people."""
    if as_json:
        click.echo(json.dumps(item, ensure_ascii=False))
    else:
        paragraph(text, indent=indent)


def write_records(
    app: Celery, records: Sequence[Record], now_ms: int, *, as_json: bool = False, err: bool = False
) -> None:
    """Write records as a table; times of one for a pipe do not depend on now."""
    objects = [object_of(app, each, now_ms) for each in records]
    if as_json:
        for each in objects:
            write(True, each, "")
        return
    rows = []
    for record, each in zip(records, objects, strict=True):
        cells = [each[name] for name in ("key", "task", "scope", "state", "updated", "crashes")]
        if on_terminal():
            cells[2] = finding.scope_in_words(record.identity.scope)
            cells[4:] = [ago(record.updated_ms, now_ms), record.crashes or ""]
        cells[3] = record.state.value + (", stale" if each["stale"] else "")
        worker = record.worker.partition("/")[0] if on_terminal() else record.worker
        rows.append([*map(str, cells), record.task_id, worker])
    table(_COLUMNS, rows, least=4, err=err)


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
