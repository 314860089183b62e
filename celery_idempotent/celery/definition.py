"""The definition of a task: what its options, its signature and its app make of it, checked once and frozen.

::

    idempotency_lease, …, the app's settings ─▶ Policy ─────┐
    idempotency_key, …, parameters of run() ──▶ Identifier ─┼─▶ Definition, made by bind(), one per task and app
    idempotency_serializer, … ────────────────▶ TaskCodec ──┘
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import celery.app.base
from celery import Task

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.typed import AnyTask, TaskBase
from celery_idempotent.errors import IdempotencyError, InvalidKey, InvalidOption
from celery_idempotent.keys.rules import Identifier, Validate
from celery_idempotent.keys.stamp import Identified
from celery_idempotent.protocol.options import KNOWN, Policy, read_task_options, refuse_unknown
from celery_idempotent.settings import PREFIX, own_settings

if TYPE_CHECKING:
    from celery import Celery


logger = logging.getLogger(__name__)

#: Functions whose call returns before the body has run.
_UNFINISHED = (
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.isgeneratorfunction,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One task of one app."""

    app: Celery
    name: str
    policy: Policy
    identifier: Identifier
    codec: TaskCodec
    #: The task has a rule for its key, for its scope.
    keyed: bool
    scoped: bool
    #: The ``__call__`` of a base after ours.
    call_behind: Callable[..., object] | None
    #: Its settle may store the result.
    fuses: bool

    def identify(
        self, args: Any, kwargs: Any, *, task_id: str, header: object = None, **about: Any
    ) -> Identified:
        """Return the identity of a call, by the stamp in its ``header`` if it has one.

        Raises:
            InvalidKey: for a malformed stamp, or a key or scope that cannot be used; never in observe mode.
        """
        try:
            if header is not None:
                stamped = Identified.from_header(header, self.identifier.namespace)
                if stamped is not None:
                    return stamped
            return self.identifier.identify(args, kwargs, task_id=task_id, **about)
        except InvalidKey as error:
            if self.policy.mode != "observe":
                raise
            logger.warning("idempotency: observed: a call would have been refused: %s", error)
            return self.identifier.by_task_id(task_id)


class DefinedTask(TaskBase):
    """A task whose class is defined once it is bound to an app."""

    abstract = True

    #: ``None`` if the task is switched off.
    _active: Definition | None = None
    #: ``None`` for Celery's own tasks. ``bind()`` sets it last.
    _definition: Definition | None = None

    def idempotency_definition(self) -> Definition | None:
        """Return the definition; ``None`` if the task is Celery's own or switched off."""
        # Celery shows other threads a task that is half bound: it would be published unstamped.
        if self._definition is None and not is_celerys_own(self):
            self.bind(self.app)
        return self._active

    def _defined(self) -> Definition:
        """Return the definition, also if the task is switched off."""
        self.idempotency_definition()
        if self._definition is None:
            raise IdempotencyError(f"{self.name} is Celery's own task and runs as Celery runs it.")
        return self._definition

    @property
    def idempotency_policy(self) -> Policy:
        """The checked options of this task; ``IdempotencyError`` for a task of Celery's own."""
        return self._defined().policy


def is_celerys_own(task: AnyTask | type[AnyTask]) -> bool:
    """Is this a task that Celery brings along, or the sweep?"""
    return str(task.name).startswith(("celery.", "celery_idempotent."))


def define(task: type[AnyTask], base: type, app: Celery) -> Definition:
    """Return the definition of ``task``; ``base``: the class whose ``__call__`` and ``backend`` this serves.

    Raises:
        InvalidOption: for an unknown or bad option, or a coroutine or generator function that no base runs.
    """
    name = str(task.name)
    refuse_unknown(own_settings(app), KNOWN, where="the app", prefix=PREFIX)
    policy, about = read_task_options(task, name, app.conf.get)
    # The call that waits stands for later ones, whatever their arguments.
    if policy.publish_once == "until_start":
        about.setdefault("fingerprint", None)
    behind = task.__mro__[task.__mro__.index(base) + 1 :]
    first = next(each for each in behind if "__call__" in vars(each))
    run = object.__new__(task).run
    has_runner = any("__call__" in vars(each) for each in task.__mro__ if each not in (base, Task))
    if policy.mode != "off" and not has_runner and any(kind(run) for kind in _UNFINISHED):
        refused = InvalidOption(
            f"Task {name} is a coroutine or generator function: its call returns before its body runs. Run it within "
            "the task (asyncio.run(…)), give the task a base whose __call__ does, or switch protection off for it "
            '(idempotency_mode="off").'
        )
        if policy.mode == "enforce":
            raise refused
        logger.warning("idempotency: observed: a task would have been refused: %s", refused)
    return Definition(
        app=app,
        name=name,
        policy=policy,
        identifier=Identifier(
            name, inspect.signature(run), validate=_validation_of(run, app, name), **about
        ),
        codec=TaskCodec(app, name, policy),
        keyed=about.get("key") is not None,
        scoped=about.get("scope") is not None,
        call_behind=None if first is Task else vars(first)["__call__"],
        fuses=policy.mode == "enforce"
        and inspect.getattr_static(task, "backend") is vars(base)["backend"],
    )


def _validation_of(run: Any, app: Celery, name: str) -> Validate | None:
    """Return Celery's validation of a task's arguments; ``None`` if it takes no models."""
    wrapper = getattr(run, "__func__", run)
    # Celery's wrapper that validates is the only run() from this module.
    if getattr(wrapper, "__globals__", None) is not vars(celery.app.base):
        return None
    own = (None,) * inspect.ismethod(run)  # in the place of self

    @functools.wraps(wrapper.__wrapped__)
    def arguments(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args[len(own) :], kwargs

    validated = wrapper.__globals__["pydantic_wrapper"](app, arguments, name, strict=False)

    def validate(args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            return validated(*own, *(args or ()), **(kwargs or {}))  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001  validators are the user's code
            return args, kwargs  # the task will raise it

    return validate


#: The apps whose task modules are imported, or are being imported.
loaded: weakref.WeakSet[Celery] = weakref.WeakSet()


def definitions(app: Celery, *, load: bool = False) -> list[Definition]:
    """Return those of the app's tasks, also of tasks that are switched off; ``load``: import all tasks before."""
    if load:
        load_tasks(app)
    found = [getattr(task, "_definition", None) for task in list(app.tasks.values())]
    return [each for each in found if each is not None]


def definition_of(app: Celery, namespace: str, *, load: bool = False) -> Definition | None:
    """Return the definition of the task with this namespace; ``load``: import the app's tasks if none is known."""
    for each in definitions(app):
        if each.identifier.namespace == namespace:
            return each
    if load:
        load_tasks(app)
        return definition_of(app, namespace)
    return None


def load_tasks(app: Celery) -> None:
    """Import the modules with the app's tasks once, as a worker does; raises what a module raises."""
    if app in loaded:
        return
    loaded.add(app)  # already now: the modules may ask for tasks themselves
    # Else Celery has Django run its checks, which this may be one of.
    before = os.environ.get("CELERY_SKIP_CHECKS", "")
    os.environ["CELERY_SKIP_CHECKS"] = "1"
    try:
        app.loader.import_default_modules()
    except BaseException:
        loaded.discard(app)
        raise
    finally:
        os.environ["CELERY_SKIP_CHECKS"] = before
