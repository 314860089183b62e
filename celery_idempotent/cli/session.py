"""What several commands have: the app and its store, options, output, and exit codes that scripts can use."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery_idempotent import errors
from celery_idempotent.celery import finding
from celery_idempotent.celery.registry import load_tasks, namespaces
from celery_idempotent.celery.story import ago, iso
from celery_idempotent.records import Record, Selection, State
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery import Celery

#: Exit codes beside click's 2 for wrong usage: something was found, refused or left alone; the store did not answer, so
#: that nobody knows whether it was done.
FOUND, UNREACHABLE = 1, 3

F = TypeVar("F", bound=Callable[..., object])

#: So many characters of a cell are shown on a terminal.
_WIDEST = 40

#: The columns of a table of records; the narrow ones come first.
_COLUMNS = ("KEY", "TASK", "SCOPE", "STATE", "CHANGED", "CRASHES", "TASK ID", "WORKER")

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_LENGTH = re.compile(r"([0-9]{1,9})\s*(s|min|m|h|d)", re.ASCII)


class _UnreachableError(click.ClickException):
    exit_code = UNREACHABLE


@dataclass(frozen=True, slots=True)
class Session:
    """The app that ``-A`` names, with its tasks imported, and its store; ``name`` is how ``-A`` named it."""

    app: Celery
    store: Store
    name: str

    def namespaces(self) -> list[str]:
        """Return what keys may be for: the app's tasks, and the views of its Django project."""
        views = django_part("celery_idempotent.django.http.views")
        return list(
            dict.fromkeys([*namespaces(self.app), *(views.view_namespaces() if views else ())])
        )

    def known_namespace(self, name: str) -> str:
        """Return the namespace that a task's name stands for; say so if no task of the app has it."""
        namespace = finding.namespace_of(self.app, name)
        if namespace is None and name not in self.namespaces():
            note(f"No task of this app is called {name}: looking for records of that namespace.")
        return namespace or name

    def selection(self, given: dict[str, Any]) -> Selection:
        """Return the selection that :data:`selection_options` make; they are taken out of ``given``."""
        task, scope, key, state, since, before = (
            given.pop(name) for name in ("task", "scope", "key", "state", "since", "before")
        )
        now_ms = self.store.now_ms()
        default = frozenset(State) if key or scope else finding.UNFINISHED_AND_FAILED
        return Selection(
            states=STATES[state] if state else default,
            stale=state == "stale",
            namespace=task and self.known_namespace(task),
            scopes=frozenset(scopes_of(scope)) if scope else frozenset(),
            keys=frozenset(finding.spellings(key)) if key else frozenset(),
            since_ms=None if since is None else now_ms - since,
            before_ms=None if before is None else now_ms - before,
        )


def scopes_of(text: str) -> list[str]:
    """Return the canonical scopes that somebody who types this may mean.

    Raises:
        InvalidKey: if there is no such scope.
    """
    of_user = finding.scope_of_user(text)
    return [of_user] if of_user else finding.spellings(text, what="scope")


# -- commands ----------------------------------------------------------------------------------------------------------


class Command(click.Command):
    """A command with examples, that turns what it may raise into a message and an exit code."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = [f"celery -A proj idempotency {each}" for each in examples]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each on a line that can be copied."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {each}\n" for each in self.examples))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (errors.StoreUnavailable, errors.StoreMisconfigured) as error:
            raise _UnreachableError(f"the store cannot be used: {error}") from error
        except (errors.InvalidOption, errors.InvalidKey) as error:
            raise click.UsageError(str(error), ctx) from error


def command(name: str, *examples: str, **options: Any) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function of a :class:`Session`."""

    def decorate(function: Callable[..., None]) -> Command:
        @click.pass_context
        def run(ctx: click.Context, /, **given: object) -> None:
            function(session_of(ctx), **given)

        wrapped = update_wrapper(run, function)
        return click.command(name, cls=Command, examples=examples, **options)(wrapped)

    return decorate


def session_of(ctx: click.Context) -> Session:
    """Return the app with its tasks imported, and its store."""
    app: Celery = ctx.obj.app
    try:
        load_tasks(app)
    except ImportError as error:
        raise click.UsageError(f"the app's tasks cannot be imported: {error}", ctx) from error
    named = ctx.find_root().params.get("app")
    return Session(app, get_store(app), named if isinstance(named, str) else "proj")


def django_part(module: str) -> Any:
    """Return a module of ours that only a Django project with our app can use, ``None`` in any other."""
    registry = sys.modules.get("django.apps")
    if registry is None or not registry.apps.ready:
        return None
    if not registry.apps.is_installed("celery_idempotent.django"):
        return None
    return import_module(module)


# -- options -----------------------------------------------------------------------------------------------------------


def _milliseconds(text: str) -> int:
    """Read ``90s``, ``10m``, ``2h`` or ``1d``."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no length of time: 90s, 10m, 2h or 1d.")
    return int(found[1]) * _UNITS[found[2]] * 1000


STATES = {**finding.STATES, "any": frozenset(State)}


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Put these options on a command, in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


#: Which record a KEY is about.
key_options = options(
    click.option("--task", metavar="NAME", help="Only this task (or namespace)."),
    click.option(
        "--scope",
        metavar="SCOPE",
        help="Only this scope; `user 17` for what that user sent over HTTP.",
    ),
)

selection_options = options(
    key_options,
    click.option("--key", metavar="KEY", help="Only this key, in every scope."),
    click.option(
        "--state",
        type=click.Choice(list(STATES), case_sensitive=False),
        help="Only this state. Default: any with --key or --scope, else all but COMPLETED.",
    ),
    click.option(
        "--since", type=_milliseconds, metavar="TIME", help="Changed within the last 10m, 2h, 1d."
    ),
    click.option(
        "--before",
        type=_milliseconds,
        metavar="TIME",
        help="Not changed for 10m, 2h, 1d, or longer.",
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


# -- output: tables for people, tabs for pipes, JSON lines for programs ------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, least: int = 99) -> None:
    """Write a table, into a pipe whole and with tabs.

    On a terminal cells are cut, empty columns are left out, and where it is too narrow, so are the last, down to
    ``least`` columns.
    """
    if not on_terminal():
        for row in [head, *rows]:
            click.echo("\t".join(cell or "-" for cell in row))
        return
    columns = [
        [cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in (title, *cells)]
        for title, *cells in zip(head, *rows, strict=True)
        if any(cells)
    ]
    widths = [max(map(len, column)) for column in columns]
    while len(widths) > least and sum(widths) + 2 * len(widths) > width():
        widths.pop()
    for line in zip(*columns[: len(widths)], strict=True):
        cells = [cell.ljust(size) for cell, size in zip(line, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


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
    for line in lines:
        click.secho(line, bold=bold)


def note(text: str) -> None:
    """Write a message for people to standard error, where a pipe does not see it."""
    click.echo(text, err=True)


def write_json(item: Mapping[str, object]) -> None:
    """Write one object, on a line of its own."""
    click.echo(json.dumps(item, ensure_ascii=False))


def write_records(session: Session, records: Sequence[Record], now_ms: int) -> None:
    """Write records as a table."""
    whole = not on_terminal()
    table(_COLUMNS, [cells_of(session, each, now_ms, whole=whole) for each in records], least=4)


def cells_of(session: Session, record: Record, now_ms: int, *, whole: bool) -> list[str]:
    """Return the cells of a record; ``whole``: for a pipe, where times do not depend on now."""
    changed = iso(record.updated_ms) if whole else ago(record.updated_ms, now_ms)
    stale = ", stale" if record.stale(now_ms) else ""
    return [
        record.identity.key,
        finding.task_name(session.app, record.identity),
        record.identity.scope if whole else finding.scope_in_words(record.identity.scope),
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
        "task": finding.task_name(session.app, identity),
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


def on_terminal() -> bool:
    """Does a person read the output, or a program?"""
    return sys.stdout.isatty()


def width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((80, 24)).columns
