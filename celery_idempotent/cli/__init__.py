"""The command line: ``celery -A proj idempotency …``, a plugin of Celery's own.

Celery imports this whenever it starts, a worker included: the commands are imported when one is called.
"""

from __future__ import annotations

from importlib import import_module

import click

from celery_idempotent import errors

__all__ = ["idempotency"]


class _Group(click.Group):
    """Imports the commands when one is used, and turns their errors into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, in the order of the help."""
        return list(import_module(f"{__name__}.commands").COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a command by its name."""
        commands: dict[str, click.Command] = import_module(f"{__name__}.commands").COMMANDS
        return commands.get(cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except errors.STORE_ERRORS as error:
            click.ClickException(f"the store cannot be used: {error}").show()
            ctx.exit(3)
        except (errors.InvalidOption, errors.InvalidKey, ImportError) as error:
            raise click.UsageError(str(error), ctx) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def idempotency(ctx: click.Context) -> None:
    """Inspect, explain and change the records of idempotent tasks.

    Exit codes: 0 success; 1 a finding, no such record, or a record left unchanged; 2 wrong usage; 3 the store cannot be
    reached.
    """
    if getattr(ctx.obj, "no_color", False):
        ctx.color = False
