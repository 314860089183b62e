"""``check``: what may go wrong, whether all is well right now, and whether a deploy would change a key.

The file of ``--keys`` is in the repository. It has how each task made its keys when it was last written. In CI, before
the deploy, it is compared with what the code says now::

    file   {"shop.charge": {"key": "order_id", …}}
    code   idempotency_key="order_id, customer"       a call that is repeated after the deploy has another key

With ``--write`` the file follows the code, as far as no key changes; a change of keys takes ``--accept TASK``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from celery_idempotent.celery.checks import check, locked
from celery_idempotent.cli.options import json_option
from celery_idempotent.cli.output import note, paragraph, write_json
from celery_idempotent.cli.session import (
    FOUND,
    UNREACHABLE,
    OurCommand,
    Session,
    app_named,
    django_part,
    loaded_app,
    session_of,
)
from celery_idempotent.operations.health import Health, health
from celery_idempotent.operations.wording import time_in_words

#: Findings that mean that the store does not answer.
_STORE_DOWN = "E006"


@click.command(
    "check",
    cls=OurCommand,
    examples=[
        "check",
        "check --health",
        "check --keys keys.lock",
        "check --keys keys.lock --write",
    ],
)
@click.option(
    "--health", "only_health", is_flag=True, help="Is all well right now? Quick, for orchestrators."
)
@click.option(
    "--keys",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Would a deploy change a key? Compares the app's tasks with this file, and asks no server.",
)
@click.option("--write", is_flag=True, help="Write that file: all that changes no key.")
@click.option(
    "--accept", multiple=True, metavar="TASK", help="Write what changes keys of this task, too."
)
@json_option
@click.pass_context
def check_command(
    ctx: click.Context,
    only_health: bool,
    keys: Path | None,
    write: bool,
    accept: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check how the app, its store, its broker and its workers are set up.

    Each finding has an id, what can go wrong, and what to set. Exit code 1 if there is any, 3 if the store does not
    answer.

    With --health nothing is said about settings: does the store answer, did a sweep end within three intervals, does no
    message wait in the outbox for over a minute?

    With --keys nothing is asked but whether each task makes its keys as the file says, or declares a transition.
    """
    if (keys and only_health) or (write and not keys) or (accept and not write):
        raise click.UsageError(
            "--write goes with --keys, --accept with --write, --health with none."
        )
    if keys:
        _tell_keys(ctx, keys, write=write, accepted=accept, as_json=as_json)
        return
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


def _tell_keys(
    ctx: click.Context, path: Path, *, write: bool, accepted: tuple[str, ...], as_json: bool
) -> None:
    """Tell how the app's tasks differ from the file, write what may be written, and end with the exit code."""
    now = locked.lock_of(loaded_app(ctx))
    was = _read_file(path, now if write else None)
    for name in accepted:
        if name not in was and name not in now:
            raise click.UsageError(f"--accept: neither the app nor the file has a task {name}.")
    found = locked.compare(was, now)
    if write:
        lock = locked.accept(was, now, found, [*accepted])
        _write(path, locked.lock_text(lock))
        found = locked.compare(lock, now)
        note(f"Written: {path}, with {len(lock):,} {'task' if len(lock) == 1 else 'tasks'}.")
    _tell_difference(found, as_json=as_json)
    ctx.exit(FOUND if found.differences else 0)


def _tell_difference(found: locked.Comparison, *, as_json: bool) -> None:
    for said in found.covered:
        note(said)
    for each in found.differences:
        if as_json:
            told = {"task": each.task, "change": each.what, "was": each.was, "now": each.now}
            write_json({**told, "problem": each.problem, "hint": each.hint})
        else:
            paragraph(f"{each.problem} {each.hint}")
    if not found.differences:
        note("No key changes.")


def _read_file(path: Path, missing: locked.Lock | None) -> locked.Lock:
    """Return what the file says, or ``missing`` if there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(locked.MAX_LOCK_BYTES + 1)
        if len(text) > locked.MAX_LOCK_BYTES:
            raise ValueError(f"it has more than {locked.MAX_LOCK_BYTES:,} bytes")
        return locked.read_lock(text)
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise click.UsageError(f"There is no {path}: --write makes it.") from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"{path} cannot be read: {said}.") from error


def _write(path: Path, text: str) -> None:
    """Write all of it or nothing."""
    written = None
    try:
        path = path.resolve()
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        handle, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(written).chmod(mode)
        Path(written).replace(path)
    except OSError as error:
        if written is not None:
            Path(written).unlink(missing_ok=True)
        raise click.UsageError(f"{path} cannot be written: {error.strerror}.") from error
