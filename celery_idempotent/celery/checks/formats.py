"""Checks of serializers and compression: whether messages and results can be written, and read where they are
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kombu import compression

from celery_idempotent.celery.checks.finding import Finding, Tasks, named
from celery_idempotent.serializers import content_types, installed

if TYPE_CHECKING:
    from celery import Celery


def known(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find names that kombu does not know."""
    conf = app.conf
    unknown = [
        f"{setting} {name!r}"
        for setting, name in (
            ("result_serializer", conf.result_serializer),
            *((f"the serializer of {task}", each.serializer) for task, (each, _) in tasks.items()),
        )
        if not installed(str(name))
    ]
    unknown += [
        f"{setting} {name!r}"
        for setting in ("task_compression", "result_compression")
        if (name := conf.get(setting)) and not _compresses(name)
    ]
    if unknown:
        yield Finding(
            id="E014",
            problem=f"A serializer or compression is not installed: {named(unknown)}.",
            hint="Install its package, or name another one of kombu's registry, such as json or gzip.",
        )


def accepted(app: Celery, tasks: Tasks) -> Iterator[Finding]:
    """Find formats that this app writes and refuses to read."""
    conf = app.conf
    refused = [
        f"{name} ({task.serializer})"
        for name, (task, _) in tasks.items()
        if installed(str(task.serializer)) and not _accepts(conf.accept_content, task.serializer)
    ]
    if refused:
        yield Finding(
            id="W015",
            problem="Published in a format that a worker with these settings refuses, and so drops:"
            f" {named(refused)}.",
            hint="Add the format to accept_content, unless other workers run these tasks.",
        )
    written = conf.result_serializer
    readable = conf.result_accept_content or conf.accept_content
    keep = any(not task.ignore_result for task, _ in tasks.values())
    if keep and installed(str(written)) and not _accepts(readable, written):
        yield Finding(
            id="W016",
            problem=f"The result backend's results are written as {written}, which this app does not accept: a"
            " duplicate whose result is not in the record gets none from there.",
            hint="Add it to result_accept_content or accept_content, unless others alone read the results.",
        )


def pickled(app: Celery, _tasks: Tasks) -> Iterator[Finding]:
    """Find out whether pickles are accepted."""
    lists = [app.conf.accept_content, app.conf.result_accept_content or ()]
    if any(_accepts(each, "pickle") for each in lists):
        yield Finding(
            id="W017",
            problem="Pickles are accepted: whoever can write to the broker, the result backend or the store has code of"
            " theirs run by what reads from there, workers and Django's admin alike.",
            hint="Take pickle out of accept_content and result_accept_content once nothing is written with it.",
        )


def _accepts(accept: Iterable[str], name: str) -> bool:
    return content_types.get(name, name) in {content_types.get(each, each) for each in accept}


def _compresses(name: str) -> bool:
    try:
        compression.get_encoder(name)
    except KeyError:
        return False
    return True
