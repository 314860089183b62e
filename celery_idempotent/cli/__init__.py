"""The command line: ``celery -A proj idempotency …``, a plugin of Celery's own.

Celery imports this whenever it starts, a worker included: the commands are imported when one is called.
"""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["idempotency"]

_LOOK = ("list", "show", "explain", "stats")
_OPERATE = ("release", "requeue", "complete", "fail", "forget")
_KEEP_UP = ("sweep", "prune", "check")


class _Group(click.Group):
    """Imports the commands when one is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, in the order of the help."""
        return [*_LOOK, *_OPERATE, *_KEEP_UP]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = "operations" if cmd_name in _OPERATE else "looking"
        command: click.Command = getattr(
            import_module(f"{__name__}.{module}"), f"{cmd_name}_command"
        )
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def idempotency(ctx: click.Context) -> None:
    """Records of idempotent tasks: look at them, ask why, act on them.

    Exit codes: 0 fine; 1 something was found, refused or not there; 2 wrong usage; 3 the store cannot be reached.
    """
    if getattr(ctx.obj, "no_color", False):
        ctx.color = False
