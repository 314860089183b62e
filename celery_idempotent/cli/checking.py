"""``check``: the setup of the app, and whether all is well right now."""

from __future__ import annotations

from collections.abc import Iterator

import click

from celery_idempotent.celery.checks import check
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import note, paragraph, write_json
from celery_idempotent.cli.session import (
    FOUND,
    UNREACHABLE,
    OurCommand,
    Session,
    app_named,
    django_part,
    session_of,
)
from celery_idempotent.operations.health import Health, health
from celery_idempotent.operations.wording import time_in_words

#: Findings that mean that the store does not answer.
_STORE_DOWN = "E006"


@click.command(
    "check",
    cls=OurCommand,
    examples=["check", "check --health"],
)
@click.option(
    "--health", "only_health", is_flag=True, help="Is all well right now? Quick, for orchestrators."
)
@json_option
@click.pass_context
def check_command(
    ctx: click.Context,
    only_health: bool,
    as_json: bool,
) -> None:
    """Check how the app and its store are set up.

    Each finding has an id, what can go wrong, and what to set. Exit code 1 if there is any, 3 if the store does not
    answer.

    With --health nothing is said about settings: does the store answer, did a sweep end within three intervals, does no
    message wait in the outbox for over a minute?
    """
    if only_health:
        _tell_health(session_of(ctx), as_json=as_json)
        return
    found = check(app_named(ctx))
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


def _tell_health(session: Session, *, as_json: bool) -> None:
    """Tell whether all is well right now, and end with the exit code."""
    found = health(session.app, session.store, outbox_ms=_outbox_ms(session))
    if as_json:
        write_json(found.as_json())
    else:
        for name, well, said in _sentences(found):
            paragraph(said, indent=f"{name:<8}{'well     ' if well else 'TROUBLE  '}")
    if not found.well:
        raise click.exceptions.Exit(FOUND)


def _sentences(found: Health) -> Iterator[tuple[str, bool, str]]:
    yield "store", True, f"It counted in {found.answered_ms:.0f} ms."
    sweeps = found.sweeps
    if sweeps is None:
        said = "This store does not note when sweeps end."
    elif sweeps.interval is None:
        said = "This app asks for no sweeps."
    elif sweeps.last is None:
        said = f"None has ended yet; one is due every {sweeps.interval:g} s. Does beat run?"
    else:
        said = f"The last ended {sweeps.ago} ago; one is due every {sweeps.interval:g} s."
    yield "sweep", found.sweeps_well, said
    waiting = found.outbox_ms
    said = "Nothing waits." if waiting is None else f"A message waits for {time_in_words(waiting)}."
    yield "outbox", found.outbox_well, said


def _outbox_ms(session: Session) -> int | None:
    """Return for how long the oldest message of the outbox waits."""
    outbox = django_part("celery_idempotent.django.outbox")
    return None if outbox is None else outbox.oldest_ms(using=session.store.outbox_alias)
