"""``check --keys``: would a deploy change a key?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from celery_idempotent.celery.checks.locked import (
    MAX_LOCK_BYTES,
    Comparison,
    Lock,
    accept,
    compare,
    lock_of,
    lock_text,
    read_lock,
)
from celery_idempotent.cli.output import note, paragraph, write_json
from celery_idempotent.cli.session import FOUND, loaded_app


def tell_keys(
    ctx: click.Context, path: Path, *, write: bool, accepted: tuple[str, ...], as_json: bool
) -> None:
    """Tell how the app's tasks differ from the file, write what may be written, and end with the exit code."""
    now = lock_of(loaded_app(ctx))
    was = _read_file(path, now if write else None)
    for name in accepted:
        if name not in was and name not in now:
            raise click.UsageError(f"--accept: neither the app nor the file has a task {name}.")
    found = compare(was, now)
    if write:
        lock = accept(was, now, found, [*accepted])
        _write(path, lock_text(lock))
        found = compare(lock, now)
        note(f"Written: {path}, with {len(lock):,} {'task' if len(lock) == 1 else 'tasks'}.")
    _tell_difference(found, as_json=as_json)
    ctx.exit(FOUND if found.differences else 0)


def _tell_difference(found: Comparison, *, as_json: bool) -> None:
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


def _read_file(path: Path, missing: Lock | None) -> Lock:
    """Return what the file says, or ``missing`` if there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LOCK_BYTES + 1)
        if len(text) > MAX_LOCK_BYTES:
            raise ValueError(f"it has more than {MAX_LOCK_BYTES:,} bytes")
        return read_lock(text)
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
