"""``release``, ``requeue``, ``complete``, ``fail``, ``forget``: on one record, or on all that a filter means.

::

    KEY     find it ─ say what it is and what this may cost ─ ask ─ do it ────────────────────── exit code
    --all   find them ─ sort out: to be done, live, nothing to do ─ preview ─ ask ─ do each ─ summary, exit code

Each is done to the record as it was found, by its token and its state: what has changed during the question is left
alone. Only ``complete`` has no ``--all``, since each operation has a result of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from celery_idempotent.celery.operations import offered
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.cli.execution import (
    DONE,
    OWNER_IS_LIVE,
    CommandRequest,
    execute_all,
    records_in_words,
    request_of,
    request_options,
)
from celery_idempotent.cli.objects import cells_of
from celery_idempotent.cli.options import filter_of, filter_options, key_options
from celery_idempotent.cli.output import Progress, note
from celery_idempotent.cli.session import FOUND, Session, command
from celery_idempotent.cli.showing import find_one
from celery_idempotent.operations import Operation
from celery_idempotent.operations.bulk import Verdict, collect, verdict
from celery_idempotent.operations.choosing import EFFECTS, STEP_EFFECTS
from celery_idempotent.operations.explaining import story_of
from celery_idempotent.operations.finding import Filter, pages
from celery_idempotent.operations.values import value_from_json
from celery_idempotent.records import Page, Record
from celery_idempotent.serializers import LARGEST

#: So many records are shown as a sample.
_SAMPLE = 5

_WHY_NOT: dict[Operation, str] = {
    "release": "only a QUEUED or a PROCESSING record can be released.",
    "requeue": "only an INTERRUPTED or a PROCESSING record that keeps its message"
    ' (idempotency_on_stale="requeue") can be requeued.',
    "complete": "only a record that is not COMPLETED, of a task of this app, can be completed. Forget it first.",
    "fail": "only a QUEUED, PROCESSING or INTERRUPTED record can be failed.",
    "forget": "there is no record.",
}
_NO_STEPS = (
    "a step can be completed (of a task of this app) or forgotten (if it is stored) only while the record is QUEUED,"
    " PROCESSING or INTERRUPTED."
)

_step_option = click.option(
    "--step", metavar="NAME", help="One step of an unfinished record, not the whole."
)


def _command(operation: Operation, text: str) -> click.Command:
    """Make the command of an operation that may be about one KEY or, with ``--all``, about what filters mean.

    Both forms have one set of options, so click cannot say which of them go together: the command itself refuses, for
    example, ``--limit`` with a KEY.
    """

    @click.argument("key", required=False)
    @click.option("--all", "every", is_flag=True, help="All that the filters mean, not one KEY.")
    @filter_options
    @click.option(
        "--limit",
        type=click.IntRange(1, 100_000),
        default=1000,
        show_default=True,
        help="With --all: so many at most.",
    )
    @click.option("--dry-run", is_flag=True, help="With --all: say what would be done.")
    def run(session: Session, key: str | None, every: bool, **given: Any) -> None:
        request = request_of(operation, given)
        if every is (key is not None):
            raise click.UsageError("Give a KEY, or --all with filters.")
        if every and request.step is not None:
            raise click.UsageError("--step goes with a KEY, not with --all.")
        limit, dry_run = given.pop("limit"), given.pop("dry_run")
        if key is None:
            wanted = filter_of(session, given)
            _execute_on_filter(session, request, wanted, limit=limit, dry_run=dry_run)
        else:
            names = [f"--{name}" for name, value in given.items() if value is not None]
            names = [name for name in names if name not in ("--task", "--scope")]
            if names or dry_run:
                raise click.UsageError(
                    f"{(names or ['--dry-run'])[0]} goes with --all, not with a KEY."
                )
            record = find_one(session, key, task=given["task"], scope=given["scope"])
            _execute_on_one(session, request, record)

    for option in reversed(request_options):
        run = option(run)
    if operation == "forget":
        run = _step_option(run)
    run.__doc__ = f"{text}\n\n    {_HELP}"
    examples = [
        f"{operation} order-17 --task shop.charge --reason 'customer called'",
        f"{operation} --all --task shop.charge --state stale --before 10m",
    ]
    if operation == "forget":
        examples[1] = f"{operation} --all --task shop.charge --error CardDeclined --since 2h"
    return command(operation, examples=examples)(run)


_HELP = (
    "It asks first, and does nothing to a record that has changed since, or whose owner is live (unless forced)."
    " Exit code 1 if anything was left alone."
)


def _execute_on_one(session: Session, request: CommandRequest, record: Record) -> None:
    story = story_of(session.app, session.store, record)
    why_not = _why_not(session, request, record)
    if why_not is None and story.live and not request.force:
        why_not = f"{OWNER_IS_LIVE}. Wait for its end, or give --force and a --reason."
    if why_not is not None:
        note(f"{story.headline}\nNothing was done: {why_not}")
        raise click.exceptions.Exit(FOUND)
    if not request.yes:
        note(story.headline)
        cost = next(each.cost for each in story.choices if each.operation == request.operation)
        effects = f"{EFFECTS[request.operation]} {cost}"
        note(
            f"{request.operation} {effects if request.step is None else STEP_EFFECTS[request.operation]}"
        )
    what = "it" if request.step is None else f"step {request.step}"
    request.confirm(f"{request.operation.capitalize()} {what}?")
    execute_all(session, request, [record], total=1)


def _why_not(session: Session, request: CommandRequest, record: Record) -> str | None:
    """Return why a request means nothing for a record."""
    known = definition_of(session.app, record.identity.namespace) is not None
    if request.operation in offered(record, known=known, step=request.step):
        return None
    if request.step is None:
        return _WHY_NOT[request.operation]
    steps = ", ".join(name for name, _ in record.steps) or "none"
    return f"{_NO_STEPS} Its steps: {steps}."


def _execute_on_filter(
    session: Session, request: CommandRequest, wanted: Filter, *, limit: int, dry_run: bool
) -> None:
    found, more = _collect(session, request.operation, wanted, limit)
    more_text = f"There are more than {limit:,}: run it again for the rest." if more else ""
    _execute_on_all(session, request, found, more=more_text, dry_run=dry_run)


def _collect(
    session: Session, operation: Operation, wanted: Filter, limit: int
) -> tuple[list[Record], bool]:
    """Return what a filter means, up to a limit, and whether there is more."""
    with Progress("keys looked at") as progress:

        def counted() -> Iterator[Page]:
            for page in pages(session.app, session.store, wanted):
                progress.add(page.looked_at)
                yield page

        return collect(session.store, operation, counted(), limit=limit)


def _execute_on_all(
    session: Session,
    request: CommandRequest,
    records: Sequence[Record],
    *,
    more: str = "",
    dry_run: bool = False,
) -> None:
    """Say what would be done to these records, ask, do it, and tell what came of each."""
    now_ms = session.store.now_ms()
    sorted_out: dict[Verdict, list[Record]] = {"do": [], "live": [], "left": []}
    for record in records:
        sorted_out[verdict(request.operation, record, now_ms)].append(record)
    chosen = sorted_out["do"] + (sorted_out["live"] if request.force else [])
    _preview(session, request, sorted_out, chosen, now_ms)
    if more:
        note(more)
    if dry_run:
        return
    if chosen:
        request.confirm(f"{request.operation.capitalize()} {records_in_words(len(chosen))}?")
    left = len(records) - len(chosen)
    execute_all(session, request, chosen, total=len(chosen), left=left)


def _preview(
    session: Session,
    request: CommandRequest,
    sorted_out: dict[Verdict, list[Record]],
    chosen: Sequence[Record],
    now_ms: int,
) -> None:
    done = DONE[request.operation]
    total = sum(map(len, sorted_out.values()))
    note(f"{records_in_words(total)} found; {len(chosen):,} to be {done}.")
    if chosen:
        states = Counter(each.state.value for each in chosen)
        counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
        note(f"{request.operation} {EFFECTS[request.operation]} ({counted})")
        for row in (cells_of(session, each, now_ms, whole=False) for each in chosen[:_SAMPLE]):
            note("  " + "  ".join(cell for cell in row[:5] if cell))
        if len(chosen) > _SAMPLE:
            note(f"  … and {len(chosen) - _SAMPLE:,} more")
    if sorted_out["live"] and not request.force:
        note(
            f"{records_in_words(len(sorted_out['live']))} left alone: {OWNER_IS_LIVE} (--force, with a --reason)."
        )
    if sorted_out["left"]:
        note(
            f"{records_in_words(len(sorted_out['left']))} left alone: {_WHY_NOT[request.operation]}"
        )


release_command = _command(
    "release", "End the claim of KEY, or of all that match: the next delivery or call runs."
)
requeue_command = _command(
    "requeue", "Publish the message that the record of KEY keeps again, or those of all that match."
)


@click.argument("key")
@key_options
@click.option("--value", metavar="JSON", help="What its run would have returned, as JSON.")
@click.option(
    "--value-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="The same from a file, or from standard input (`-`, with --yes).",
)
@_step_option
def _complete_one(
    session: Session, key: str, value: str | None, value_file: str | None, **given: Any
) -> None:
    """Settle KEY, or one step of it, with its true result: callers get it, and nothing runs.

    Use this if the task took effect and its result was not recorded. Check the outside system first,
    then give what the run, or the step, would have returned. It asks before it writes, and does
    nothing to a record that has changed since, or whose owner is live (unless forced), or that is COMPLETED. Exit
    code 1 if it was left alone.
    """
    request = request_of("complete", given)
    if (value is None) is (value_file is None):
        raise click.UsageError("Give the value: --value JSON, or --value-file FILE.")
    if value_file == "-" and not request.yes:
        raise click.UsageError("A value from standard input takes --yes: nobody could answer.")
    record = find_one(session, key, task=given["task"], scope=given["scope"])
    if _why_not(session, request, record) is None:
        try:
            stored = value_from_json(session.app, record.identity, value or _read_value(value_file))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        request = replace(request, value=stored)
    _execute_on_one(session, request, record)


def _read_value(path: str | None) -> bytes:
    """Return what a file has, or the beginning of one that is too long for a value."""
    if path is None:
        return b""
    with click.open_file(path, "rb") as file:
        content: bytes = file.read(LARGEST + 1)
    return content


for _option in reversed(request_options):
    _complete_one = _option(_complete_one)

complete_command = command(
    "complete",
    examples=[
        """complete order-17 --task shop.charge --value '{"charge": "ch_17"}' --reason 'the bank has it'""",
        """complete order-17 --task shop.charge --step charge --value '"ch_17"'""",
    ],
)(_complete_one)
fail_command = _command(
    "fail",
    "Settle KEY, or all that match, as FAILED: nothing runs until the retention ends.",
)
forget_command = _command(
    "forget", "Delete the record of KEY, or of all that match: the next call runs, done or not."
)
