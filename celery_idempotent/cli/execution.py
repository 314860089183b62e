"""Executing an operation on records: the question, a line for each record, a summary, the exit code.

Exit codes are for scripts: 0 if all of it was done, ``FOUND`` if something was left alone, ``UNREACHABLE`` if the store
did not answer for a record, so that it is not known whether that one was done.
"""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Iterable, Mapping

import click

from celery_idempotent.celery.operations import LONGEST_REASON
from celery_idempotent.cli.objects import object_of
from celery_idempotent.cli.options import Given, json_option
from celery_idempotent.cli.output import Progress, note, write_json
from celery_idempotent.cli.session import FOUND, UNREACHABLE, Session
from celery_idempotent.operations import Operation, OperationRequest, Outcome
from celery_idempotent.operations.bulk import Ended, execute
from celery_idempotent.records import Record
from celery_idempotent.records.frozen import frozen

DONE: dict[Operation, str] = {
    "release": "released",
    "requeue": "requeued",
    "complete": "completed",
    "fail": "failed",
    "forget": "forgotten",
}

OWNER_IS_LIVE = "its owner is live"

_SAID: dict[Outcome, str] = {
    Outcome.UNSENT: "queued, and not published yet: the next sweep after its deadline tries again",
    Outcome.CHANGED: "left alone: it has changed meanwhile",
    Outcome.LIVE: f"left alone: {OWNER_IS_LIVE}",
}


#: How an operation is asked for.
request_options = [
    click.option(
        "--reason", default="", metavar="TEXT", help="Why: for the log, the event and the record."
    ),
    click.option(
        "--who", metavar="NAME", help="Who does it. Default: the account of this machine."
    ),
    click.option("--force", is_flag=True, help="Also where the owner is live; takes a --reason."),
    click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    json_option,
]


def request_of(operation: Operation, given: Given) -> CommandRequest:
    """Return the request that these options give; they are taken out of ``given``."""
    request = CommandRequest(
        operation,
        step=given.pop("step", None),
        who=given.pop("who") or _user(),
        **{name: given.pop(name) for name in ("reason", "force", "yes", "as_json")},
    )
    if request.force and not request.reason:
        raise click.UsageError("To take a key away from a live owner, say why: --reason '…'.")
    if len(request.reason) > LONGEST_REASON:
        raise click.UsageError(f"A --reason has {LONGEST_REASON} characters at most.")
    if request.step == "":
        raise click.UsageError("--step is empty.")
    return request


def _user() -> str:
    """Return who calls, by the name of the machine's account."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}"


@frozen(frozen=True, slots=True, kw_only=True)
class CommandRequest(OperationRequest):
    """What a command line asks for; ``yes``: without a question."""

    yes: bool
    as_json: bool

    @property
    def done(self) -> str:
        """What is said of a record to which it was done."""
        step = "" if self.step is None else f"step {self.step} "
        return f"{step}{DONE[self.operation]}"

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


def execute_all(
    session: Session,
    request: CommandRequest,
    records: Iterable[Record],
    *,
    total: int,
    left: int = 0,
) -> None:
    """Do it to one record after the other, and end with the exit code; ``left`` were left alone before."""
    counts: Counter[Outcome | None] = Counter()
    try:
        with Progress("records", total=total) as progress:
            for each in execute(session.app, request, records):
                counts[each.outcome] += 1
                progress.add()
                _tell(session, request, each)
    except KeyboardInterrupt:
        note(f"\nInterrupted after {counts.total():,} of {total:,}: run it again for the rest.")
        raise click.exceptions.Exit(FOUND) from None
    if total > 1 or left:
        note(_summary(request, counts, left=left, untried=total - counts.total()))
    if counts[None]:
        raise click.exceptions.Exit(UNREACHABLE)
    if left or counts.total() > counts[Outcome.DONE]:
        raise click.exceptions.Exit(FOUND)


def _tell(session: Session, request: CommandRequest, ended: Ended[Record]) -> None:
    """Write what came of one record."""
    outcome = "unknown" if ended.outcome is None else ended.outcome.value
    if request.as_json:
        now_ms = ended.record.updated_ms
        told = object_of(session, ended.record, now_ms)
        step = {} if request.step is None else {"step": request.step}
        write_json({**told, "operation": request.operation, **step, "outcome": outcome})
        return
    said = f"it may have been done, or not: {ended.trouble}"
    if ended.outcome is not None:
        said = _SAID.get(ended.outcome, request.done)
    click.echo(f"{ended.record.identity}: {said}")


def _summary(
    request: CommandRequest, counts: Mapping[Outcome | None, int], *, left: int, untried: int
) -> str:
    parts = [
        (counts[Outcome.DONE], DONE[request.operation]),
        (counts[Outcome.UNSENT], "queued and not published yet"),
        (counts[Outcome.CHANGED] + counts[Outcome.LIVE] + left, "left alone"),
        (counts[None], "unknown: the store did not answer"),
        (max(untried, 0), "not tried: run it again"),
    ]
    return ", ".join(f"{number:,} {text}" for number, text in parts if number) + "."


def records_in_words(count: int) -> str:
    """Return how many records, for people."""
    return "1 record" if count == 1 else f"{count:,} records"
