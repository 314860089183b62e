"""``release``, ``requeue``, ``complete``, ``fail``, ``forget``: on one record, or on all that are selected.

::

    find ─ sort: apply, held, skip ─ preview ─ ask ─ do each ─ summary, exit code

Each is done to the record as it was found, by its token and its state: a record that has changed during the question is
left alone. Only ``complete`` has no ``--all``, since a value belongs to one key.
"""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from celery_idempotent.celery.finding import pages
from celery_idempotent.celery.operations import (
    LONGEST_REASON,
    OPERATIONS,
    OUTCOMES,
    Ended,
    Operation,
    OperationRequest,
    Outcome,
    Verdict,
    operate_on_each,
    verdict,
)
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.celery.story import tell_story, value_from_json
from celery_idempotent.cli.looking import find_one
from celery_idempotent.cli.session import (
    FOUND,
    UNREACHABLE,
    Session,
    cells_of,
    command,
    django_part,
    json_option,
    key_options,
    note,
    object_of,
    options,
    selection_options,
    write_json,
)
from celery_idempotent.records import Record, Selection, State

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from celery_idempotent.django.models import OutboxMessage

#: So many records are shown as a sample.
_SAMPLE = 5

_request_options = options(
    click.option(
        "--reason", default="", metavar="TEXT", help="Why: for the log, the event and the record."
    ),
    click.option(
        "--who", metavar="NAME", help="Who does it. Default: the account of this machine."
    ),
    click.option("--force", is_flag=True, help="Also where the owner is live; takes a --reason."),
    click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    json_option,
)

_bulk_options = options(
    click.argument("one", required=False, metavar="[KEY]"),
    click.option("--all", "every", is_flag=True, help="All that are selected, not one KEY."),
    selection_options,
    click.option(
        "--limit",
        type=click.IntRange(1, 100_000),
        default=1000,
        show_default=True,
        help="With --all: so many at most.",
    ),
    click.option("--dry-run", is_flag=True, help="With --all: say what would be done."),
)

_value_options = options(
    click.argument("one", metavar="KEY"),
    key_options,
    click.option(
        "--value", required=True, metavar="JSON", help="What its run would have returned, as JSON."
    ),
)

_HELP = (
    "It asks first, and does nothing to a record that has changed since, or whose owner is live (unless forced)."
    " Exit code 1 if anything was left alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """An operation on the command line; ``yes``: without a question."""

    session: Session
    request: OperationRequest
    yes: bool
    as_json: bool

    @property
    def operation(self) -> Operation:
        return self.request.operation

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


def _user() -> str:
    """Return who calls, by the name of the machine's account."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}"


def _make_command(operation: Operation, text: str, *examples: str) -> click.Command:
    """Make the command of an operation, on one KEY or on all that are selected."""

    @(_value_options if operation == "complete" else _bulk_options)
    @_request_options
    def run(
        session: Session,
        one: str | None,
        who: str | None,
        reason: str,
        force: bool,
        yes: bool,
        as_json: bool,
        every: bool = False,
        limit: int = 1,
        dry_run: bool = False,
        value: str | None = None,
        **given: Any,
    ) -> None:
        if force and not reason:
            raise click.UsageError("To take a key away from a live owner, say why: --reason '…'.")
        if len(reason) > LONGEST_REASON:
            raise click.UsageError(f"A --reason has {LONGEST_REASON} characters at most.")
        request = OperationRequest(operation, who=who or _user(), reason=reason, force=force)
        asked = _Command(session=session, request=request, yes=yes, as_json=as_json)
        if every is (one is not None):
            raise click.UsageError("Give a KEY, or --all with what selects records.")
        if every:
            _execute_on_all(asked, session.selection(given), limit=limit, dry_run=dry_run)
            return
        task, scope = given.pop("task"), given.pop("scope")
        given["dry-run"] = dry_run or None
        for name in [name for name, value in given.items() if value is not None]:
            raise click.UsageError(f"--{name} goes with --all, not with a KEY.")
        record = find_one(session, one or "", task=task, scope=scope)
        if value is not None and definition_of(session.app, record.identity.namespace) is not None:
            try:
                stored = value_from_json(session.app, record.identity, value)
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            asked = replace(asked, request=replace(request, value=stored))
        _execute_on_one(asked, record)

    run.__doc__ = f"{text}\n\n    {_HELP}"
    return command(operation, *(f"{operation} {each}" for each in examples))(run)


def _execute_on_one(asked: _Command, record: Record) -> None:
    session, operation = asked.session, asked.operation
    story = tell_story(session.app, session.store, record)
    cost = next((each.cost for each in story.choices if each.operation == operation), None)
    why_not = None if cost is not None else OPERATIONS[operation].refusal
    if why_not is None and story.live and not asked.request.force:
        why_not = "its owner is live. Wait for its end, or give --force and a --reason."
    if why_not is not None:
        note(f"{story.headline}\nNothing was done: {why_not}")
        raise click.exceptions.Exit(FOUND)
    if not asked.yes:
        note(f"{story.headline}\n{operation} {OPERATIONS[operation].effect} {cost}")
    asked.confirm(f"{operation.capitalize()} it?")
    _execute_each(asked, [record])


def _execute_on_all(asked: _Command, wanted: Selection, *, limit: int, dry_run: bool) -> None:
    """Say what would be done to the selected records, ask, do it, and report each outcome."""
    session, operation = asked.session, asked.operation
    records, more = _collect(session, operation, wanted, limit)
    staged = _staged(session, wanted) if operation == "forget" else None
    waiting = 0 if staged is None else staged.count()
    chosen = _preview(asked, records)
    if waiting:
        note(f"{waiting:,} messages in the outbox to be discarded.")
    if more:
        note(f"There are more than {limit:,}: run it again for the rest.")
    if dry_run:
        return
    if chosen or waiting:
        asked.confirm(f"{operation.capitalize()} {len(chosen):,} record(s)?")
    # Before the records: a message that is sent meanwhile would make a new one.
    if staged is not None and waiting:
        note(f"{staged.delete()[0]:,} messages in the outbox discarded.")
    _execute_each(asked, chosen, left=len(records) - len(chosen))


def _collect(
    session: Session, operation: Operation, wanted: Selection, limit: int
) -> tuple[list[Record], bool]:
    """Return the selected records, each once, up to a limit, and whether there are more."""
    found: dict[object, Record] = {}
    for page in pages(session.store, wanted):
        for each in page.records:
            if len(found) == limit:
                return list(found.values()), True
            # Lists leave out whether there is a message.
            record = session.store.get(each.identity) if operation == "requeue" else each
            if record is not None:
                found[record.identity] = record
    return list(found.values()), False


def _preview(asked: _Command, records: Sequence[Record]) -> list[Record]:
    """Say what would be done to which of the records, and return these."""
    session, operation = asked.session, asked.operation
    texts, now_ms = OPERATIONS[operation], session.store.now_ms()
    by_verdict: dict[Verdict, list[Record]] = {"apply": [], "held": [], "skip": []}
    for record in records:
        by_verdict[verdict(operation, record, now_ms)].append(record)
    chosen = by_verdict["apply"] + (by_verdict["held"] if asked.request.force else [])
    found = "1 record" if len(records) == 1 else f"{len(records):,} records"
    note(f"{found} found; {len(chosen):,} to be {texts.done}.")
    if chosen:
        states = Counter(each.state.value for each in chosen)
        counted = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
        note(f"{operation} {texts.effect} ({counted})")
        for each in chosen[:_SAMPLE]:
            note("  " + "  ".join(filter(None, cells_of(session, each, now_ms, whole=False)[:5])))
    if (held := len(by_verdict["held"])) and not asked.request.force:
        note(f"{held:,} left alone: its owner is live (--force, with a --reason).")
    if left := len(by_verdict["skip"]):
        note(f"{left:,} left alone: {texts.refusal}")
    return chosen


def _execute_each(asked: _Command, records: Sequence[Record], *, left: int = 0) -> None:
    """Do it to one record after the other, and end with the exit code; ``left`` were left alone before."""
    counts: Counter[Outcome | None] = Counter()
    total = len(records)
    try:
        for each in operate_on_each(asked.session.app, asked.request, records):
            counts[each.outcome] += 1
            _report(asked, each)
    except KeyboardInterrupt:
        note(f"\nInterrupted after {counts.total():,} of {total:,}: run it again for the rest.")
        raise click.exceptions.Exit(FOUND) from None
    if total > 1 or left:
        parts = [
            (counts[Outcome.DONE], OPERATIONS[asked.operation].done),
            (counts[Outcome.UNSENT], "queued and not published yet"),
            (counts[Outcome.CHANGED] + counts[Outcome.LIVE] + left, "left alone"),
            (counts[None], "unknown: the store did not answer"),
            (total - counts.total(), "not tried: run it again"),
        ]
        note(", ".join(f"{number:,} {text}" for number, text in parts if number) + ".")
    if counts[None]:
        raise click.exceptions.Exit(UNREACHABLE)
    if left or counts.total() > counts[Outcome.DONE]:
        raise click.exceptions.Exit(FOUND)


def _report(asked: _Command, ended: Ended[Record]) -> None:
    """Write the outcome of one record."""
    outcome = ended.outcome
    if asked.as_json:
        about = object_of(asked.session, ended.record, ended.record.updated_ms)
        word = "unknown" if outcome is None else outcome.value
        write_json({**about, "operation": asked.operation, "outcome": word})
        return
    text = f"it may have been done, or not: {ended.trouble}"
    if outcome is not None:
        text = OUTCOMES.get(outcome, OPERATIONS[asked.operation].done)
    click.echo(f"{ended.record.identity}: {text}")


def _staged(session: Session, wanted: Selection) -> QuerySet[OutboxMessage] | None:
    """Return the messages in the outbox that are meant: those of a scope that is selected as a whole."""
    alias, models = session.store.outbox_alias, django_part("celery_idempotent.django.models")
    whole = Selection(states=frozenset(State), scopes=wanted.scopes)
    if not wanted.scopes or wanted != whole or alias is None or models is None:
        return None
    found: QuerySet[OutboxMessage] = models.OutboxMessage.objects.using(alias).filter(
        scope__in=wanted.scopes
    )
    return found


release_command = _make_command(
    "release",
    "End the claim of KEY, or of all that are selected: the next delivery or call runs.",
    "order-17 --task shop.charge --reason 'customer called'",
    "--all --task shop.charge --state stale --before 10m",
)
requeue_command = _make_command(
    "requeue",
    "Publish the message that the record of KEY keeps again, or those of all that are selected.",
    "order-17 --task shop.charge",
    "--all --task shop.charge --state INTERRUPTED",
)
complete_command = _make_command(
    "complete",
    "Settle KEY with its true result: callers get it, and nothing runs. Use this if the task took effect and its"
    " result was not recorded. Check the outside system first, then give what the run would have returned.",
    """order-17 --task shop.charge --value '{"charge": "ch_17"}' --reason 'the bank has it'""",
)
fail_command = _make_command(
    "fail",
    "Settle KEY, or all that are selected, as FAILED: nothing runs until the retention ends.",
    "order-17 --task shop.charge --reason 'refunded by hand'",
    "--all --task shop.charge --state stale --before 10m",
)
forget_command = _make_command(
    "forget",
    "Delete the record of KEY, or of all that are selected: the next call runs, done or not."
    " --all --scope alone means all that is stored of it, its messages in the outbox included.",
    "order-17 --task shop.charge --reason 'customer called'",
    "--all --scope acme --limit 100000 --reason 'contract ended, ticket 4711'",
)
