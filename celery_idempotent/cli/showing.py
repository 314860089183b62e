"""``show``, alias ``explain``: one record in sentences, or with all its fields."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict

import click

from celery_idempotent.cli.listing import object_of, write_table
from celery_idempotent.cli.options import json_option, key_options, known_namespace, scopes_of
from celery_idempotent.cli.output import Progress, note, paragraph, write_json
from celery_idempotent.cli.session import FOUND, Session, command
from celery_idempotent.operations import finding
from celery_idempotent.operations.explaining import Story, story_of, story_of_nothing
from celery_idempotent.operations.finding import Found
from celery_idempotent.operations.values import shown
from celery_idempotent.records import Record

#: So many seconds are spent on a look for the same key in other scopes, unless --scan asks for all of it.
SCAN_SECONDS = 10.0


@command(
    "show",
    examples=[
        "show order-17 --task shop.charge",
        "explain 7d0b0a5e-5d3c-4f4e-9c0e-1f6f5a4f2c11",
    ],
)
@click.argument("key")
@key_options
@click.option("--scan", is_flag=True, help="Look at every key, however long that takes.")
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
    """Say why KEY is as it is: what happened, what happens next, what can be done.

    Without --scope, every scope is searched for KEY, for ten seconds or (--scan) to the end. KEY may also be the id of
    a task, as it stands in a log. A completed record is found by a task id only if the result backend has the task's
    arguments (result_extended), or with --scan. --json has every field of the record.
    """
    record, others = _find_one(session, key, task=task, scope=scope, scan=scan)
    story = story_of(session.app, session.store, record)
    now_ms = session.store.now_ms()
    content = shown(session.app, record) if value else None
    if as_json:
        about = object_of(session, record, now_ms) | {
            "fingerprint": record.fingerprint.hex() if record.fingerprint else "",
            "reserved": record.reserved,
            "delivered": record.delivered,
            "replaced": record.replaced,
            "on_stale": record.on_stale,
            "message": record.message is not None,
            "steps": [name for name, _ in record.steps],
            "explanation": asdict(story),
            "elsewhere": [object_of(session, each, now_ms) for each in others.records],
        }
        if content is not None:
            about["value"] = content.text or content.trouble
        write_json(about)
    else:
        _tell(story, session.name, _arguments_of(session, record))
        if content is not None:
            click.echo(f"\nValue\n{content.text or content.trouble}")
        if others.records:
            click.echo("\nThe same key elsewhere")
            write_table(session, others.records, now_ms)
    if others.cut:
        note("Other scopes were searched in part: --scan looks at every key.")


explain_command = show_command


def find_one(session: Session, text: str, *, task: str | None, scope: str | None) -> Record:
    """Return the one record that is meant; if there is none, or several, say so and end."""
    return _find_one(session, text, task=task, scope=scope, everywhere=False)[0]


def _find_one(
    session: Session,
    text: str,
    *,
    task: str | None,
    scope: str | None,
    scan: bool = False,
    everywhere: bool = True,
) -> tuple[Record, Found]:
    """Return the record that is meant, and those of the same key elsewhere.

    ``everywhere``: look for these also if the key was found where it was expected.
    """
    if not text:
        raise click.UsageError("KEY is empty.")
    namespace = known_namespace(session, task) if task else None
    namespaces = session.namespaces() if namespace is None else [namespace]
    meant: Sequence[Record] = finding.find_key(
        session.store, namespaces, text, scopes_of(scope) if scope else [""]
    )
    others, cut = Found(records=()), False
    if not meant:
        by_id = finding.find_task_id(session.app, session.store, text, namespace=namespace)
        meant, cut = by_id.records, by_id.cut
        if meant:
            note(f"Found {by_id.how}: {meant[0].identity}.")
    if scope is None and (not meant or (everywhere and len(meant) == 1)):
        key = meant[0].identity.key if meant else text
        with Progress("keys looked at") as progress:
            others = finding.find_key_anywhere(
                session.store,
                [key, *finding.spellings(key)],
                namespace=namespace,
                task_id=text if scan and not meant else "",
                seconds=None if scan else SCAN_SECONDS,
                looked_at=progress.add,
            )
        known = {record.identity for record in meant}
        elsewhere = [each for each in others.records if each.identity not in known]
        if not meant and len(elsewhere) == 1:
            meant, elsewhere = finding.whole(session.store, elsewhere), []
            note(f"Found by a look at every scope: {meant[0].identity}.")
        others = Found(records=elsewhere, cut=others.cut)
    if len(meant) == 1:
        return meant[0], others
    if found := [*meant, *others.records]:
        note(f"{text} is a key of {len(found)} records: say which one by --task or --scope.")
        write_table(session, found, session.store.now_ms())
        raise click.exceptions.Exit(FOUND)
    _tell(
        story_of_nothing(
            f"{text} in {task or 'any task of this app'}{f', scope {scope}' if scope else ''}"
        )
    )
    if others.cut or cut or not scan:
        note("Not every record was looked at, nor every task id: `show --scan` does.")
    raise click.exceptions.Exit(FOUND)


def _tell(story: Story, app: str = "", arguments: str = "") -> None:
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


def _arguments_of(session: Session, record: Record) -> str:
    """Return the part of a command line that names a record, to be copied."""
    about = record.identity
    task = finding.task_name(session.app, about)
    scope = f" --scope {shlex.quote(about.scope)}" if about.scope else ""
    return f"{shlex.quote(about.key)} --task {shlex.quote(task)}{scope}"
