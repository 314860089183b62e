"""``show`` and ``explain``: one record, as it is stored and in sentences."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

import click

from celery_idempotent.cli.objects import COLUMNS, cells_of, object_of, shown_state
from celery_idempotent.cli.options import json_option, key_options, known_namespace, scopes_of
from celery_idempotent.cli.output import Progress, note, on_terminal, paragraph, table, write_json
from celery_idempotent.cli.session import FOUND, Session, command
from celery_idempotent.operations import finding
from celery_idempotent.operations.explaining import Story, story_of, story_of_nothing
from celery_idempotent.operations.values import shown
from celery_idempotent.operations.wording import intervention_in_words, iso, moment
from celery_idempotent.records import Record, State

_scan_option = click.option(
    "--scan", is_flag=True, help="Look at every key for a task id: completed ones have no index."
)


@command("show", examples=["show order-17 --task shop.charge"])
@click.argument("key")
@key_options
@_scan_option
@click.option("--value", is_flag=True, help="Also the result or error, which may hold secrets.")
@json_option
def show_command(
    session: Session,
    key: str,
    task: str | None,
    scope: str | None,
    scan: bool,
    value: bool,
    as_json: bool,
) -> None:
    """Show all fields of the record of KEY, or of a task id."""
    record = find_one(session, key, task=task, scope=scope, scan=scan)
    now_ms = session.store.now_ms()
    about = object_of(session, record, now_ms) | {
        "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
        "reserved": record.reserved,
        "delivered": record.delivered,
        "replaced": record.replaced,
        "on_stale": record.on_stale,
        "message": record.message is not None,
        "steps": [name for name, _ in record.steps],
        "refusals": [
            {"kind": each.kind, "at": iso(each.at_ms), "task_id": each.task_id}
            for each in record.refusals
        ],
        "interventions": [
            {
                "operation": each.operation,
                "step": each.step,
                "who": each.who,
                "reason": each.reason,
                "at": iso(each.at_ms),
            }
            for each in record.interventions
        ],
    }
    if value:
        said = shown(session.app, record)
        about["value"] = said.text or said.trouble
    if as_json:
        write_json(about)
        return
    about["state"] = shown_state(record, now_ms)
    for name in ("created", "updated", "deadline"):
        ms = getattr(record, f"{name}_ms")
        about[name] = "" if ms is None else moment(ms, now_ms)
    about["steps"] = ", ".join(name for name, _ in record.steps)
    about["refusals"] = "; ".join(
        f"{each.kind} of task {each.task_id}, {moment(each.at_ms, now_ms)}"
        for each in record.refusals
    )
    about["interventions"] = "; ".join(
        intervention_in_words(each, moment(each.at_ms, now_ms)) for each in record.interventions
    )
    del about["stale"]
    for name, each in about.items():
        text = ("yes" if each else "") if isinstance(each, bool) else str(each)
        if text:
            paragraph(text, indent=f"{name:<13} ")


@command(
    "explain",
    examples=[
        "explain order-17 --task shop.charge",
        "explain 7d0b0a5e-5d3c-4f4e-9c0e-1f6f5a4f2c11",
    ],
)
@click.argument("key")
@key_options
@_scan_option
@json_option
def explain_command(
    session: Session, key: str, task: str | None, scope: str | None, scan: bool, as_json: bool
) -> None:
    """Say why KEY is as it is: what happened, what happens next, what can be done.

    KEY may also be the id of a task, as it stands in a log. A completed record is found by a task id only if the result
    backend has the task's arguments (result_extended), or with --scan.
    """
    record = find_one(session, key, task=task, scope=scope, scan=scan)
    story = story_of(session.app, session.store, record)
    if as_json:
        now_ms = session.store.now_ms()
        write_json(object_of(session, record, now_ms) | {"explanation": asdict(story)})
        return
    tell(story, session.name, arguments_of(session, record))


def find_one(
    session: Session, text: str, *, task: str | None, scope: str | None, scan: bool = False
) -> Record:
    """Return the one record that is meant; if there is none, or several, say so and end."""
    if not text:
        raise click.UsageError("KEY is empty.")
    namespace = known_namespace(session, task) if task else None
    found = _find(session, text, namespace, scope, scan=scan)
    if len(found.records) == 1:
        if found.how:
            note(f"Found {found.how}: {found.records[0].identity}.")
        return found.records[0]
    if found.records:
        now_ms = session.store.now_ms()
        whole = not on_terminal()
        note(
            f"{text} is a key of {len(found.records)} records: say which one by --task or --scope."
        )
        table(COLUMNS, [cells_of(session, each, now_ms, whole=whole) for each in found.records])
        raise click.exceptions.Exit(FOUND)
    what = f"{text} in {task or 'any task of this app'}"
    story = story_of_nothing(session.app, f"{what}{f', scope {scope}' if scope else ''}", namespace)
    tell(story)
    if found.cut:
        note("There are too many unfinished and failed records to look at each for a task id.")
    if not scan:
        note("If it is the id of a task, perhaps of one that completed: --scan looks at every key.")
    raise click.exceptions.Exit(FOUND)


def _find(
    session: Session, text: str, namespace: str | None, scope: str | None, *, scan: bool
) -> finding.Found:
    """Look for a key, then for a task id, where that costs little; then, if asked for, everywhere."""
    namespaces = session.namespaces() if namespace is None else [namespace]
    scopes = scopes_of(scope) if scope else [""]
    records: Sequence[Record] = finding.find_key(session.store, namespaces, text, scopes)
    if records:
        return finding.Found(records=records)
    found = finding.find_task_id(session.app, session.store, text, namespace=namespace)
    if found.records or not scan:
        return found
    wanted = finding.Filter(states=frozenset(State), namespace=namespace)
    with Progress("keys looked at") as progress:
        for page in finding.pages(session.app, session.store, wanted):
            progress.add(page.looked_at)
            for each in page.records:
                if each.task_id == text and (whole := session.store.get(each.identity)):
                    return finding.Found(records=[whole], how="by a scan")
    return found


def tell(story: Story, app: str = "", arguments: str = "") -> None:
    """Write a story for people."""
    paragraph(story.headline, bold=True)
    for title, sentences in (("So far", story.past), ("Next", story.future)):
        if sentences and story.future:
            click.echo(f"\n{title}")
        for each in sentences:
            paragraph(each, indent="  - ")
    if not story.choices:
        return
    click.echo("\nWhat you can do")
    if story.live:
        paragraph("wait. Or, with --force and a --reason:", indent="  - ")
    for choice in story.choices:
        paragraph(f"{choice.operation} {choice.effect} {choice.cost}", indent="  - ")
    click.echo(f"\n  celery -A {app} idempotency OPERATION {arguments}")


def arguments_of(session: Session, record: Record) -> str:
    """Return what names a record on a command line, to be copied."""
    about = record.identity
    task = finding.task_name(session.app, about)
    scope = f" --scope {shlex.quote(about.scope)}" if about.scope else ""
    return f"{shlex.quote(about.key)} --task {shlex.quote(task)}{scope}"
