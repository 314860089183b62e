"""The command line: ``celery -A proj idempotency …``, a plugin of Celery's own.

Celery imports this whenever it starts, a worker included: what a command needs is imported when that command is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import click

__all__ = ["idempotency"]

#: Each command with its module, in the order of the help.
_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "list": "listing",
        "show": "showing",
        "explain": "showing",
        "stats": "listing",
        "release": "operations",
        "requeue": "operations",
        "complete": "operations",
        "fail": "operations",
        "forget": "operations",
        "sweep": "upkeep",
        "prune": "upkeep",
        "check": "upkeep",
    }
)


class _Group(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return a command by its name."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"{__name__}.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def idempotency(ctx: click.Context) -> None:
    """Records of idempotent tasks: look at them, ask why, act on them.

    Exit codes: 0 fine; 1 something was found, refused or not there; 2 wrong usage; 3 the store cannot be reached.
    """
    if getattr(ctx.obj, "no_color", False):
        ctx.color = False
