"""What a task's options, its signature and its app make of it, checked once and frozen.

::

    idempotency_lease, …, the app's settings ─▶ Policy ─────┐
    idempotency_key, …, parameters of run() ──▶ Identifier ─┼─▶ Definition, made by bind(), one per task and app
    idempotency_serializer, … ────────────────▶ TaskCodec ──┘
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING

from celery import Task

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.models import validation_of
from celery_idempotent.celery.typed import AnyTask, TaskBase
from celery_idempotent.errors import (
    IdempotencyError,
    InvalidKey,
    InvalidOption,
)
from celery_idempotent.events import Reporter
from celery_idempotent.keys.rules import Identifier
from celery_idempotent.keys.stamp import Identified
from celery_idempotent.protocol.options import Policy, read_task_options, refuse_unknown_settings
from celery_idempotent.settings import own_settings
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Unpack

    from celery_idempotent.keys.rules import About

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One task of one app.

    ``keyed``, ``scoped``: the task has a rule for its key, for its scope. ``call_behind``: the
    ``__call__`` of a base class after ours, which is the way to ``run``. ``fuses``: its settle may
    store the result, for it has no result backend of its own.
    """

    name: str
    policy: Policy
    keep_ms: int
    settled_keep_ms: int
    identifier: Identifier
    codec: TaskCodec
    reporter: Reporter
    keyed: bool
    scoped: bool
    call_behind: Callable[..., object] | None
    fuses: bool

    def identify(
        self,
        args: Sequence[object] | None,
        kwargs: Mapping[str, object] | None,
        **about: Unpack[About],
    ) -> Identified:
        """Return what a call is about; one that is only observed falls back to its task id.

        Raises:
            InvalidKey: if the key or scope cannot be used, or is missing where one is required, and that is enforced.
        """
        try:
            return self.identifier.identify(args, kwargs, **about)
        except InvalidKey as error:
            if self.policy.mode != "observe":
                raise
            return self.observed(error, about["task_id"])

    def observed(self, refused: InvalidKey, task_id: str) -> Identified:
        """Say what would have been refused, and return what a call without a key is about."""
        logger.warning("idempotency: observed: a call would have been refused: %s", refused)
        return self.identifier.by_task_id(task_id)


class DefinedTask(TaskBase):
    """A task whose class is defined once it is bound to an app."""

    abstract = True

    #: Assigned whole, as the last step of ``bind()``: Celery lets other threads see a task that is half bound.
    _definition: Definition | None = None
    #: The same of a task that is not switched off.
    _active: Definition | None = None

    def _defined(self) -> Definition | None:
        """Return what ``bind()`` found; ``None``: left alone.

        Celery's lazy finalize shows a task to other threads while one thread is still binding it. To bind it here, too,
        does no harm, and then nothing is published unstamped, or through whatever app is current in this thread.
        """
        if self._definition is None and not is_celerys_own(self):
            self.bind(self.app)
        return self._definition

    def _ours(self) -> Definition:
        definition = self._defined()
        if definition is None:
            raise IdempotencyError(f"{self.name} is Celery's own task and runs as Celery runs it.")
        return definition

    def idempotency_definition(self) -> Definition | None:
        """Return the definition of a task that is not left alone, nor switched off."""
        definition = self._active or self._defined()
        return None if definition is None or definition.policy.mode == "off" else definition

    @property
    def idempotency_policy(self) -> Policy:
        """The checked options of this task.

        Raises:
            IdempotencyError: for one of Celery's own tasks.
        """
        return self._ours().policy


def is_celerys_own(task: AnyTask | type[AnyTask]) -> bool:
    """Is this one of the tasks that Celery brings along, or our own sweep? They are left alone."""
    return str(task.name).startswith(("celery.", "celery_idempotent."))


def define(task: type[AnyTask], base: type, app: Celery) -> Definition:
    """Return the definition of ``task``.

    ``base`` is the class whose ``__call__`` and ``backend`` this serves.

    Raises:
        InvalidOption: if an ``idempotency_*`` attribute or setting is unknown or has a bad value, or the task's body
            would be settled before it runs.
    """
    name = str(task.name)
    refuse_unknown_settings(own_settings(app))
    policy, about = read_task_options(task, name, app.conf.get)
    codec = TaskCodec(app, name, policy)
    if policy.mode != "off":
        _check_body(task, base, observed=policy.mode == "observe")
    behind = task.__mro__[task.__mro__.index(base) + 1 :]
    first = next(each for each in behind if "__call__" in vars(each))
    return Definition(
        name=name,
        policy=policy,
        keep_ms=policy.keep_ms,
        settled_keep_ms=policy.settled_keep_ms,
        identifier=Identifier(name, _signature_of(task), validate=validation_of(task), **about),
        codec=codec,
        reporter=Reporter(name, lambda: app.tasks[name], partial(get_store, app)),
        keyed=about.get("key") is not None,
        scoped=about.get("scope") is not None,
        call_behind=None if first is Task else vars(first)["__call__"],
        fuses=policy.mode == "enforce"
        and inspect.getattr_static(task, "backend") is vars(base)["backend"],
    )


def _check_body(task: type[AnyTask], base: type, *, observed: bool) -> None:
    """Refuse a body that returns before it has run, unless a base is there to run it.

    Raises:
        InvalidOption: saying what to do.
    """
    run = inspect.getattr_static(task, "run")
    kind = _kind_of(getattr(run, "__func__", run))
    others = (each for each in task.__mro__ if each not in (base, Task))
    if not kind or any("__call__" in vars(each) for each in others):
        return
    refused = InvalidOption(
        f"Task {task.name} is a {kind} function, and Celery stores what it returns without running it: its record "
        "would say COMPLETED before anything is done. Run it within the task (asyncio.run(…)), give the task a base "
        'whose __call__ does, or switch protection off for it (idempotency_mode="off").'
    )
    if not observed:
        raise refused
    logger.warning("idempotency: observed: a task would have been refused: %s", refused)


def _signature_of(task: type) -> inspect.Signature:
    """Return the signature of ``run`` without ``self``."""
    run = inspect.getattr_static(task, "run")
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    return inspect.signature(MethodType(run, object()))


def _kind_of(function: object) -> str:
    """Return what a call of ``function`` gives instead of running it, ``""`` if it runs it.

    What is hidden behind a decorator or a lambda is found when it returns (:func:`.is_unfinished`).
    """
    while isinstance(function, partial):
        function = function.func
    # An object that is called as a function.
    for each in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each):
            return "coroutine"
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "generator"
    return ""
