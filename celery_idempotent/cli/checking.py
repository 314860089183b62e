"""``check``: what may go wrong, and for orchestrators, whether all is well right now."""

from __future__ import annotations

import click

from celery_idempotent.celery.checks import check
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import note, paragraph, write_json
from celery_idempotent.cli.session import FOUND, UNREACHABLE, Command, app_of

__all__ = ["check_command"]

#: Findings that mean that the store does not answer.
_STORE_DOWN = "E006"


@click.command("check", cls=Command, examples=["check"])
@json_option
@click.pass_context
def check_command(ctx: click.Context, as_json: bool) -> None:
    """Check how the app, its store, its broker and its workers are set up.

    Each finding has an id, what can go wrong, and what to set. Exit code 1 if there is any, 3 if the store does not
    answer. What you accept: idempotency_silenced_checks.
    """
    found = check(app_of(ctx))
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
