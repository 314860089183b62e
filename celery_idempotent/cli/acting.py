"""``release``, ``requeue``, ``complete``, ``fail``, ``forget``: on one record, or on all that a filter means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from celery_idempotent.celery.operations import offered
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.cli.doing import (
    DONE,
    OWNER_IS_LIVE,
    Order,
    do,
    order_of,
    order_options,
    records_in_words,
)
from celery_idempotent.cli.objects import row_of
from celery_idempotent.cli.options import filter_of, filter_options, key_options
from celery_idempotent.cli.output import Progress, note
from celery_idempotent.cli.session import FOUND, Session, command
from celery_idempotent.cli.telling import find_one
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
        order = order_of(operation, given)
        if every is (key is not None):
            raise click.UsageError("Give a KEY, or --all with filters.")
        if every and order.step is not None:
            raise click.UsageError("--step goes with a KEY, not with --all.")
        limit, dry_run = given.pop("limit"), given.pop("dry_run")
        if key is None:
            wanted = filter_of(session, given)
            _act_on_filter(session, order, wanted, limit=limit, dry_run=dry_run)
        else:
            names = [f"--{name}" for name, value in given.items() if value is not None]
            names = [name for name in names if name not in ("--task", "--scope")]
            if names or dry_run:
                raise click.UsageError(
                    f"{(names or ['--dry-run'])[0]} goes with --all, not with a KEY."
                )
            record = find_one(session, key, task=given["task"], scope=given["scope"])
            _act_on_one(session, order, record)

    for option in reversed(order_options):
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


def _act_on_one(session: Session, order: Order, record: Record) -> None:
    story = story_of(session.app, session.store, record)
    why_not = _why_not(session, order, record)
    if why_not is None and story.live and not order.force:
        why_not = f"{OWNER_IS_LIVE}. Wait for its end, or give --force and a --reason."
    if why_not is not None:
        note(f"{story.headline}\nNothing was done: {why_not}")
        raise click.exceptions.Exit(FOUND)
    if not order.yes:
        note(story.headline)
        cost = next(each.cost for each in story.choices if each.operation == order.operation)
        effects = f"{EFFECTS[order.operation]} {cost}"
        note(
            f"{order.operation} {effects if order.step is None else STEP_EFFECTS[order.operation]}"
        )
    what = "it" if order.step is None else f"step {order.step}"
    order.confirm(f"{order.operation.capitalize()} {what}?")
    do(session, order, [record], total=1)


def _why_not(session: Session, order: Order, record: Record) -> str | None:
    """Return why an order means nothing for a record."""
    known = definition_of(session.app, record.identity.namespace) is not None
    if order.operation in offered(record, known=known, step=order.step):
        return None
    if order.step is None:
        return _WHY_NOT[order.operation]
    steps = ", ".join(name for name, _ in record.steps) or "none"
    return f"{_NO_STEPS} Its steps: {steps}."


def _act_on_filter(
    session: Session, order: Order, wanted: Filter, *, limit: int, dry_run: bool
) -> None:
    found, more = _collect(session, order.operation, wanted, limit)
    more_text = f"There are more than {limit:,}: run it again for the rest." if more else ""
    _act_on_all(session, order, found, more=more_text, dry_run=dry_run)


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


def _act_on_all(
    session: Session,
    order: Order,
    records: Sequence[Record],
    *,
    more: str = "",
    dry_run: bool = False,
) -> None:
    """Say what would be done to these records, ask, do it, and tell what came of each."""
    now_ms = session.store.now_ms()
    sorted_out: dict[Verdict, list[Record]] = {"do": [], "live": [], "left": []}
    for record in records:
        sorted_out[verdict(order.operation, record, now_ms)].append(record)
    doing = sorted_out["do"] + (sorted_out["live"] if order.force else [])
    _preview(session, order, sorted_out, doing, now_ms)
    if more:
        note(more)
    if dry_run:
        return
    if doing:
        order.confirm(f"{order.operation.capitalize()} {records_in_words(len(doing))}?")
    left = len(records) - len(doing)
    do(session, order, doing, total=len(doing), left=left)


def _preview(
    session: Session,
    order: Order,
    sorted_out: dict[Verdict, list[Record]],
    doing: Sequence[Record],
    now_ms: int,
) -> None:
    done = DONE[order.operation]
    total = sum(map(len, sorted_out.values()))
    note(f"{records_in_words(total)} found; {len(doing):,} to be {done}.")
    if doing:
        states = Counter(each.state.value for each in doing)
        counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
        note(f"{order.operation} {EFFECTS[order.operation]} ({counted})")
        for row in (row_of(session, each, now_ms, whole=False) for each in doing[:_SAMPLE]):
            note("  " + "  ".join(cell for cell in row[:5] if cell))
        if len(doing) > _SAMPLE:
            note(f"  … and {len(doing) - _SAMPLE:,} more")
    if sorted_out["live"] and not order.force:
        note(
            f"{records_in_words(len(sorted_out['live']))} left alone: {OWNER_IS_LIVE} (--force, with a --reason)."
        )
    if sorted_out["left"]:
        note(f"{records_in_words(len(sorted_out['left']))} left alone: {_WHY_NOT[order.operation]}")


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
    order = order_of("complete", given)
    if (value is None) is (value_file is None):
        raise click.UsageError("Give the value: --value JSON, or --value-file FILE.")
    if value_file == "-" and not order.yes:
        raise click.UsageError("A value from standard input takes --yes: nobody could answer.")
    record = find_one(session, key, task=given["task"], scope=given["scope"])
    if _why_not(session, order, record) is None:
        try:
            stored = value_from_json(session.app, record.identity, value or _read_value(value_file))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        order = replace(order, value=stored)
    _act_on_one(session, order, record)


def _read_value(path: str | None) -> bytes:
    """Return what a file has, or the beginning of one that is too long for a value."""
    if path is None:
        return b""
    with click.open_file(path, "rb") as file:
        content: bytes = file.read(LARGEST + 1)
    return content


for _option in reversed(order_options):
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
