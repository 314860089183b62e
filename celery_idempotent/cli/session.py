"""What every command has: the app, its store, and exit codes that scripts can use.

::

    0   it was done, or all is well
    1   something was found (by a check), or refused, or left alone
    2   wrong usage; a bad option or setting of the app
    3   the store cannot be reached
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import update_wrapper
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent import errors
from celery_idempotent.celery.registry import load_tasks, namespaces
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Celery

#: Exit codes: something was found or refused; the store cannot be reached. Wrong usage is click's 2.
FOUND, UNREACHABLE = 1, 3


class _UnreachableError(click.ClickException):
    exit_code = UNREACHABLE


@dataclass(frozen=True, slots=True)
class Session:
    """The app that ``-A`` names, with its tasks imported, and its store."""

    app: Celery
    store: Store
    #: How ``-A`` named it.
    name: str

    def namespaces(self) -> list[str]:
        """Return what keys may be for: the app's tasks, and the views of its Django project."""
        views = django_part("celery_idempotent.django.http.decorators")
        return list(
            dict.fromkeys([*namespaces(self.app), *(views.view_namespaces() if views else ())])
        )


class OurCommand(click.Command):
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


def command(name: str, **options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function of a :class:`Session`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.pass_context
        def run(ctx: click.Context, /, **given: object) -> None:
            function(session_of(ctx), **given)

        return click.command(name, cls=OurCommand, **options)(update_wrapper(run, function))

    return decorate


def app_named(ctx: click.Context) -> Celery:
    """Return the app that Celery's own command line found."""
    app: Celery = ctx.obj.app
    return app


def session_of(ctx: click.Context) -> Session:
    """Return the app with its tasks imported, and its store."""
    app = app_named(ctx)
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
