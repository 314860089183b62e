"""The tasks that chaos calls: of every policy, with this library or another; each notes effects and verbs in a file."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task, chain, chord, group

from benchmarks import libraries
from celery_idempotent import current_claim, http, signals
from celery_idempotent.celery import publishing, sweep
from tests.support.apps import configure, wanted
from tests.support.ledger import Growing

#: How long a claim lives, and how soon a message without a claim is sent again, in seconds.
LEASE, RESEND = 5, 5
NOTES = "CHAOS_NOTES"
LIBRARIES = ("ours", "celery", "once", "singleton")

#: By kind of call: its share, the options of its task.
KEYED: dict[str, Any] = {"idempotency_key": "key", "idempotency_fingerprint": ("key",)}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "keyed": (6, KEYED),
    "by_id": (3, {}),
    "brief": (3, KEYED | {"idempotency_retention": 0}),
    "waiting": (2, KEYED | {"idempotency_on_conflict": "wait", "idempotency_wait": 1}),
    "requeued": (2, KEYED | {"idempotency_on_stale": "requeue"}),
    "early": (2, KEYED | {"acks_late": False, "idempotency_on_stale": "requeue"}),
    "stepping": (2, KEYED),
    "retrying": (2, KEYED | {"max_retries": None}),
    "refused": (1, KEYED),
    "once": (3, KEYED | {"idempotency_publish_once": True, "idempotency_keep_message": True}),
    "until": (2, {"idempotency_key": "key", "idempotency_publish_once": "until_start"}),
    "ordered": (3, KEYED),
    "atomic": (4, KEYED | {"idempotency_atomic": True}),
    "chain": (1, {}),
    "group": (1, {}),
    "chord": (1, {}),
}
CANVASES = ("chain", "group", "chord")
#: Each call of these runs: one effect for each task id.
EACH_RUNS = ("by_id", "brief", "until")


class Refused(Exception):
    """The bank will never accept this card."""


def note(what: str, **fields: Any) -> None:
    """Append a line."""
    line = json.dumps({"t": time.time(), "what": what, "pid": os.getpid(), **fields})
    Growing(Path(os.environ[NOTES])).append(line)


def effect(unit: str, task_id: str) -> None:
    """Take effect: outside of every server that faults meet."""
    claim = current_claim()
    about = {"token": claim.token, "id": str(claim.identity)} if claim else {}
    note("effect", unit=unit, task_id=task_id, **about)


def is_first(key: str) -> bool:
    """Say whether nobody has asked this for the key yet."""
    try:
        Path(f"{os.environ[NOTES]}.{key}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def work(
    self: Any, key: str, before: float = 0, after: float = 0, hangs: bool = False, unit: str = ""
) -> str:
    """Take effect ``before`` seconds after the start and ``after`` seconds before the end, in the way of the task."""
    kind, done = self.name, partial(effect, task_id=self.request.id)
    unit = unit or f"{kind} {self.request.id if kind in EACH_RUNS else key}"
    time.sleep(before)
    if hangs and is_first(key):
        time.sleep(8)
    if kind == "retrying" and not self.request.retries:
        raise self.retry(countdown=0.2)
    step = self.idempotency.step if hasattr(self, "idempotency") else lambda _, do, *a: do(*a)
    if kind == "stepping":
        step("a", done, f"{unit}/a")
        time.sleep(after)
        step("b", done, f"{unit}/b")
    elif kind == "atomic":
        from django.db import connection

        with connection.cursor() as cursor:
            row = (unit, self.idempotency.token, self.request.id)
            cursor.execute("INSERT INTO chaos_effects (unit, token, task) VALUES (%s, %s, %s)", row)
    else:
        done(unit)
    time.sleep(after)
    if kind == "refused":
        raise Refused(key)
    return uuid.uuid4().hex


def call(app: Celery, wish: Any, kinds: Any) -> tuple[list[str], Any]:
    """Make a call as its plan wishes; return the units that must take effect now, and the result."""
    tasks, kind, key = app.tasks, wish.kind, wish.key
    if kind in CANVASES:
        units = [f"step {key}/{n}" for n in range(4 if kind == "chord" else 3)]
        steps = [tasks["step"].si(key, 0.01, 0.01, unit=unit) for unit in units]
        if kind == "chord":
            return units, chord(steps[:3], steps[3]).apply_async()
        return units, (chain(*steps) if kind == "chain" else group(*steps)).apply_async()
    args, options = (key, wish.before, wish.after, wish.hangs), dict(wish.options)
    if kind == "ordered" and kinds == "ours":
        status = _order(tasks["ordered"], args, key)
        if status not in (200, 202):
            raise OSError(f"the answer to a request is {status}")
        return [f"{kind} {key}"], None
    if kind in ("by_id", "brief"):
        options["task_id"] = wish.task_id
    result = tasks[kind].apply_async(args, **options)
    if kind == "stepping":
        return [f"{kind} {key}/a", f"{kind} {key}/b"], result
    if kind not in EACH_RUNS:
        return [f"{kind} {key}"], result
    return [f"{kind} {result.id}"], result


def _order(task: Any, args: Any, key: str) -> int:
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        return http.enqueue(task, args, key=key, scope="someone").status
    from django.db import transaction
    from django.test import RequestFactory

    from celery_idempotent.django.http import enqueue

    request = RequestFactory().post("/", HTTP_IDEMPOTENCY_KEY=f'"{key}"')
    with transaction.atomic():  # the outbox has the message
        return enqueue(request, task, args, scope="someone").status_code


def make_app(settings: dict[str, Any], library: str) -> Celery:
    """Return the app, with tasks of one library."""
    app = Celery("chaos", set_as_current=False)
    configure(app, settings)
    publishing.RESERVED_MS = sweep.REQUEUE_MS = RESEND * 1000
    if with_django := "DJANGO_SETTINGS_MODULE" in os.environ:
        import django

        django.setup()
        from celery_idempotent.django import outbox

        outbox.LEASE_MS = RESEND * 1000
    from celery_idempotent import IdempotentTask  # Django's, where there is one

    base: dict[str, Any] = {"base": IdempotentTask}
    if library != "ours":
        base = {"base": Task, "acks_late": True, "reject_on_worker_lost": True}
        if library != "celery":
            libraries.configure(app, settings["idempotency_store"])
            base |= {"base": libraries.PEERS[library].task_class(), "once": {"graceful": True}}
    for kind, (_, options) in {**KINDS, "step": (0, {})}.items():
        if kind == "atomic" and not with_django:
            continue
        if library != "ours":
            options = {n: v for n, v in options.items() if not n.startswith("idempotency")}
        elif kind == "refused":
            options = options | {"idempotency_permanent_errors": (Refused,)}
        app.task(name=kind, bind=True, shared=False, **{**base, **options})(work)
    return app


def _note_verb(verb: str, *, event: signals.Event, **_: Any) -> None:
    if event.identity is None:
        return  # a sweep
    fields: dict[str, Any] = {"verb": verb, "id": str(event.identity), "task_id": event.task_id}
    if (record := event.record) is not None:
        fields |= {"token": record.token, "crashes": record.crashes, "of": record.task_id}
        if record.value is not None:
            fields["value"] = hashlib.sha256(record.value.body).hexdigest()[:16]
    if event.state is not None:
        fields["state"] = event.state.value
    if event.error is not None:
        fields["error"] = type(event.error).__name__
    note("verb", **fields)


def note_verbs() -> None:
    """Note each outcome that the library announces in this process."""
    for name, each in signals.OUTCOMES.items():
        each.connect(partial(_note_verb, name), weak=False)


if _wanted := wanted():
    app = make_app(_wanted["settings"], _wanted["library"])
    note_verbs()
