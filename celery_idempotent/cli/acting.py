"""``release``, ``requeue``, ``fail``, ``forget``: an operation on one record, or on all that a filter means."""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_idempotent.cli.objects import object_of, row_of
from celery_idempotent.cli.options import filter_of, filter_options, json_option
from celery_idempotent.cli.output import Progress, note, write_json
from celery_idempotent.cli.session import FOUND, UNREACHABLE, Session, command
from celery_idempotent.cli.telling import find_one
from celery_idempotent.operations import Operation, Outcome
from celery_idempotent.operations.bulk import Ended, Verdict, carry_out, verdict
from celery_idempotent.operations.explaining import EFFECTS, story_of
from celery_idempotent.operations.finding import Filter, pages
from celery_idempotent.records import Record

__all__ = [
    "Order",
    "act_on_all",
    "fail_command",
    "forget_command",
    "order_options",
    "release_command",
    "requeue_command",
]

#: So many records are shown as a sample.
_SAMPLE = 5

_DONE: dict[Operation, str] = {
    "release": "released",
    "requeue": "requeued",
    "fail": "failed",
    "forget": "forgotten",
}

_WHY_NOT: dict[Operation, str] = {
    "release": "only a QUEUED or a PROCESSING record can be released.",
    "requeue": "only an INTERRUPTED or a PROCESSING record that keeps its message"
    ' (idempotency_on_stale="requeue") can be requeued.',
    "fail": "only a QUEUED, PROCESSING or INTERRUPTED record can be failed.",
    "forget": "there is no record.",
}

_LIVE = "its owner is live"

_SAID: dict[Outcome, str] = {
    Outcome.UNSENT: "queued, and not published yet: the next sweep after its deadline tries again",
    Outcome.CHANGED: "left alone: it has changed meanwhile",
    Outcome.LIVE: f"left alone: {_LIVE}",
}


def _user() -> str:
    """Return who calls, by the name of the machine's account."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be done, by whom and why, and how it is asked for and told."""

    operation: Operation
    who: str
    reason: str
    force: bool
    yes: bool
    as_json: bool

    def confirm(self, question: str) -> None:
        """Ask, unless the answer was given; without a yes nothing is done."""
        if self.yes:
            return
        try:
            answer = click.confirm(question, err=True)
        except click.Abort:
            note("")
            answer = False
        if not answer:
            note("Nothing was done. (--yes does not ask.)")
            raise click.exceptions.Exit(FOUND)


def _by(value: str | None) -> str:
    return value or _user()


order_options = [
    click.option("--reason", default="", metavar="TEXT", help="Why: for the log and the event."),
    click.option(
        "--who", metavar="NAME", help="Who does it. Default: the account of this machine."
    ),
    click.option("--force", is_flag=True, help="Also where the owner is live; takes a --reason."),
    click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    json_option,
]


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
        order = Order(
            operation=operation,
            who=_by(given.pop("who")),
            **{name: given.pop(name) for name in ("reason", "force", "yes", "as_json")},
        )
        if order.force and not order.reason:
            raise click.UsageError("To take a key away from a live owner, say why: --reason '…'.")
        if every is (key is not None):
            raise click.UsageError("Give a KEY, or --all with filters.")
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
            _act_on_one(session, order, key, task=given["task"], scope=given["scope"])

    for option in reversed(order_options):
        run = option(run)
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


def _act_on_one(
    session: Session, order: Order, key: str, *, task: str | None, scope: str | None
) -> None:
    record = find_one(session, key, task=task, scope=scope)
    story = story_of(session.app, session.store, record)
    choice = next((each for each in story.choices if each.operation == order.operation), None)
    if choice is None or (story.live and not order.force):
        why = _WHY_NOT[order.operation] if choice is None else f"{_LIVE}."
        hint = "" if choice is None else " Wait for its end, or give --force and a --reason."
        note(f"{story.headline}\nNothing was done: {why}{hint}")
        raise click.exceptions.Exit(FOUND)
    if not order.yes:
        note(story.headline)
        note(f"{order.operation} {choice.effect} {choice.cost}")
    order.confirm(f"{order.operation.capitalize()} it?")
    _do(session, order, [record])


def _act_on_filter(
    session: Session, order: Order, wanted: Filter, *, limit: int, dry_run: bool
) -> None:
    found, more = _collect(session, order.operation, wanted, limit)
    more_text = f"There are more than {limit:,}: run it again for the rest." if more else ""
    act_on_all(session, order, found, more=more_text, dry_run=dry_run)


def _collect(
    session: Session, operation: Operation, wanted: Filter, limit: int
) -> tuple[list[Record], bool]:
    """Return what a filter means, up to a limit, and whether there is more."""
    found: dict[Any, Record] = {}
    with Progress("keys looked at") as progress:
        for page in pages(session.app, session.store, wanted):
            progress.add(page.looked_at)
            for each in page.records:
                if len(found) == limit:
                    return list(found.values()), True
                # Lists leave out whether there is a message.
                record = session.store.get(each.identity) if operation == "requeue" else each
                if record is not None:
                    found[record.identity] = record
    return list(found.values()), False


def act_on_all(
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
        order.confirm(f"{order.operation.capitalize()} {_records(len(doing))}?")
    left = len(records) - len(doing)
    _do(session, order, doing, left=left)


def _preview(
    session: Session,
    order: Order,
    sorted_out: dict[Verdict, list[Record]],
    doing: Sequence[Record],
    now_ms: int,
) -> None:
    done = _DONE[order.operation]
    total = sum(map(len, sorted_out.values()))
    note(f"{_records(total)} found; {len(doing):,} to be {done}.")
    if doing:
        states = Counter(each.state.value for each in doing)
        counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
        note(f"{order.operation} {EFFECTS[order.operation]} ({counted})")
        for row in (row_of(session, each, now_ms, whole=False) for each in doing[:_SAMPLE]):
            note("  " + "  ".join(cell for cell in row[:5] if cell))
        if len(doing) > _SAMPLE:
            note(f"  … and {len(doing) - _SAMPLE:,} more")
    if sorted_out["live"] and not order.force:
        note(f"{_records(len(sorted_out['live']))} left alone: {_LIVE} (--force, with a --reason).")
    if sorted_out["left"]:
        note(f"{_records(len(sorted_out['left']))} left alone: {_WHY_NOT[order.operation]}")


def _do(session: Session, order: Order, records: Sequence[Record], *, left: int = 0) -> None:
    """Do it to one record after the other, and end with the exit code."""
    ended: list[Ended] = []
    try:
        with Progress("records", total=len(records)) as progress:
            for each in carry_out(
                session.app,
                order.operation,
                records,
                force=order.force,
                who=order.who,
                reason=order.reason,
            ):
                ended.append(each)
                progress.add()
                _tell(session, order, each)
    except KeyboardInterrupt:
        note(f"\nInterrupted after {len(ended):,} of {len(records):,}: run it again for the rest.")
        raise click.exceptions.Exit(FOUND) from None
    trouble = ended[-1].trouble if ended and ended[-1].outcome is None else ""
    if len(records) > 1 or left:
        note(_summary(order, ended, left=left, untried=len(records) - len(ended)))
    if trouble:
        raise click.exceptions.Exit(UNREACHABLE)
    if left or any(each.outcome is not Outcome.DONE for each in ended):
        raise click.exceptions.Exit(FOUND)


def _tell(session: Session, order: Order, ended: Ended) -> None:
    """Write what came of one record."""
    outcome = "unknown" if ended.outcome is None else ended.outcome.value
    if order.as_json:
        now_ms = ended.record.updated_ms
        told = object_of(session, ended.record, now_ms)
        write_json({**told, "operation": order.operation, "outcome": outcome})
        return
    said = f"it may have been done, or not: {ended.trouble}"
    if ended.outcome is not None:
        said = _SAID.get(ended.outcome, _DONE[order.operation])
    click.echo(f"{ended.record.identity}: {said}")


def _summary(order: Order, ended: Iterable[Ended], *, left: int, untried: int) -> str:
    counts = Counter(each.outcome for each in ended)
    parts = [
        (counts[Outcome.DONE], _DONE[order.operation]),
        (counts[Outcome.UNSENT], "queued and not published yet"),
        (counts[Outcome.CHANGED] + counts[Outcome.LIVE] + left, "left alone"),
        (counts[None], "unknown: the store did not answer"),
        (untried, "not tried: run it again"),
    ]
    return ", ".join(f"{number:,} {text}" for number, text in parts if number) + "."


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"


release_command = _command(
    "release", "End the claim of KEY, or of all that match: the next delivery or call runs."
)
requeue_command = _command(
    "requeue", "Publish the message that the record of KEY keeps again, or those of all that match."
)
fail_command = _command(
    "fail",
    "Settle KEY, or all that match, as FAILED: nothing runs until the retention ends.",
)
forget_command = _command(
    "forget", "Delete the record of KEY, or of all that match: the next call runs, done or not."
)
