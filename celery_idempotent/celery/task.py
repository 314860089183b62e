"""``IdempotentTask``: what Celery calls, and where each of these calls goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypedDict

from celery import signals as celery_signals
from celery.exceptions import Ignore
from celery.utils.functional import maybe_list

from celery_idempotent.celery import callbacks, delivery, publishing
from celery_idempotent.celery.canvas import AnySignature, canvas_tasks, unstamp
from celery_idempotent.celery.definition import (
    DefinedTask,
    Definition,
    define,
    definitions,
    is_celerys_own,
)
from celery_idempotent.celery.delivery import (
    RUN,
    Delivery,
    deliver,
    delivery_of,
    identify_delivery,
    next_after_ours,
)
from celery_idempotent.celery.operations import OperationRequest, operate_or_raise
from celery_idempotent.celery.sweep import install_sweep
from celery_idempotent.celery.typed import CallResult, Options, Result, Sig
from celery_idempotent.errors import (
    FingerprintMismatch,
    IdempotencyError,
    InProgress,
    InvalidOption,
)
from celery_idempotent.keys import stamp
from celery_idempotent.protocol.claim import Claim, Phase, current_claim
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.options import refuse_unknown
from celery_idempotent.protocol.run import give_back, run_in_progress, unguarded
from celery_idempotent.protocol.shield import NO_SHIELD, shields
from celery_idempotent.records import Identity, Record
from celery_idempotent.settings import PREFIX, is_explicit, real_app
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker.consumer import Consumer
    from typing_extensions import Unpack


class How(TypedDict, total=False):
    """Options of all operations."""

    reason: str
    who: str
    force: bool


class IdempotentTask(DefinedTask):
    """A task that takes effect once for each idempotency key.

    Use it as ``@app.task(base=IdempotentTask, idempotency_key="order_id")``, or for a whole app as
    ``Celery(task_cls="celery_idempotent:IdempotentTask")``. Messages are acknowledged late and come back when their
    worker is lost, unless the task or the app says otherwise: the record then makes the second delivery harmless.
    """

    abstract = True
    # Not set: bind() does, unless the app has a setting.
    acks_late: bool = None  # type: ignore[assignment]
    reject_on_worker_lost: bool | None = None
    Request = "celery_idempotent.celery.worker:Request"

    # -- definition ----------------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        """Put the claim before the ``__call__`` of other bases, whose transactions thus end before the settle."""
        super().__init_subclass__(**options)
        owner = next(each for each in cls.__mro__ if "__call__" in vars(each))
        if owner is cls or not issubclass(owner, IdempotentTask):
            cls.__call__ = _claiming_first(vars(owner)["__call__"])  # type: ignore[method-assign]

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Connect to ``app``, and check every option.

        Raises:
            InvalidOption: if an ``idempotency_*`` attribute or setting is unknown or has a bad value.
        """
        off = getattr(cls, "idempotency_mode", app.conf.get("idempotency_mode")) == "off"
        if not off:
            for option in ("acks_late", "reject_on_worker_lost"):
                if getattr(cls, option) is None and not is_explicit(app, f"task_{option}"):
                    setattr(cls, option, True)
            # Expected: Celery logs them at INFO, without a traceback.
            expected = (*maybe_list(cls.throws), FingerprintMismatch, InProgress)
            cls.throws = tuple(dict.fromkeys(expected))
        app = real_app(app)
        bound: Celery = super().bind(app)
        if not is_celerys_own(cls):
            _connect_receivers()
            install_sweep(app)
            definition = define(cls, IdempotentTask, app)
            cls._active = None if off else definition
            cls._definition = definition
        return bound

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise ``InvalidOption`` for an option, which would have no effect any more."""
        if name.startswith(PREFIX):
            raise InvalidOption(
                f"{name} of task {self.name} is read when the task is defined: set it there."
            )
        super().__setattr__(name, value)

    # -- publishing ----------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        task_id: str | None = None,
        producer: object = None,
        link: object = None,
        link_error: object = None,
        shadow: str | None = None,
        **options: object,
    ) -> CallResult:
        """Publish with key and fingerprint; also takes ``idempotency_key`` and ``idempotency_scope``.

        Raises:
            InvalidKey: if the key or scope cannot be used, or is missing where one is required.
            InvalidOption: for another option that begins with ``idempotency_``.
        """
        for name in options:  # not in a function, which every publish would pay for
            if name[:12] == PREFIX and name not in stamp.CALL_OPTIONS:
                _refuse_misspelt(self, options)
        definition = self._active or self.idempotency_definition()
        options |= {"task_id": task_id, "producer": producer, "shadow": shadow}
        options |= {"link": link, "link_error": link_error}
        send: publishing.Send = super().apply_async  # type: ignore[assignment]  # of AsyncResult()
        return publishing.publish(self, definition, send, args, kwargs, options)

    def AsyncResult(self, task_id: str, **options: Any) -> CallResult:  # noqa: N802  Celery's name
        """Return the result of a call, which says whether it was a duplicate if that is known."""
        known = {"backend": self.backend, "task_name": self.name, "app": self.app}
        return CallResult(task_id, **{**known, **options})

    def send_deferred(self, call: publishing.DeferredCall) -> Result:
        """Send a call that an outbox deferred; it passed the ``apply_async`` of subclasses when it was made."""
        definition = self.idempotency_definition()
        send: publishing.Send = super().apply_async  # type: ignore[assignment]
        return publishing.send_deferred(self, definition, send, call)

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run in this process, by the same protocol; also takes ``idempotency_key`` and ``idempotency_scope``."""
        _refuse_misspelt(self, options)
        definition = self.idempotency_definition()
        if definition is None:
            return super().apply(args, kwargs, *rest, **options)
        publishing.stamp_call(definition, args, kwargs, options, eager=True)
        with shields.get(get_ident(), NO_SHIELD).around_eager_call():
            result = super().apply(args, kwargs, *rest, **options)
        vars(result).update(duplicate=None, earlier=None)  # as a CallResult has it
        return result

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run once: in a worker (and ``apply``) by the protocol; called as a function, as a function."""
        request: Any = self.request
        run = delivery_of(request) if RUN in vars(request) else None
        if run is not None and not run.reached_run:  # after the bases in front of this one
            return next_after_ours(run)(*args, **kwargs)
        definition = self._active or self.idempotency_definition()
        if run is not None or definition is None or request.called_directly:
            return super().__call__(*args, **kwargs)
        return deliver(Delivery(self, definition, request, args, kwargs))

    @property
    def backend(self) -> Any:
        """The result backend; between the settle and the end of the delivery, a view of it."""
        backend, run = super().backend, callbacks.settled_run.get()
        return backend if run is None else callbacks.BackendAfterSettle(backend, run)

    @backend.setter
    def backend(self, backend: object) -> None:
        behind: Any = super(IdempotentTask, type(self)).backend  # a property, unlike its stub
        behind.fset(self, backend)

    def replace(self, sig: Sig) -> Any:
        """Replace this task with another, as Celery does; the record is completed as *replaced*.

        A process that dies in between repeats the body, and publishes the replacement again under the same task id. For
        a replacement with this task's own key, the key is released before, and nothing is recorded.

        Raises:
            IdempotencyError: in an atomic task, for a replacement with its own key.
        """
        run, definition = run_in_progress(), self.idempotency_definition()
        unstamp(sig, self.request.id)
        if run is None or run.task_id != self.request.id or definition is None:
            return super().replace(sig)
        parts = canvas_tasks(sig)
        if any(_has_identity(part, definition, run.identity) for part in parts):
            if run.transaction is not None:
                raise IdempotencyError(
                    f"{self.name} is atomic, and its key is not free before its transaction commits: give the "
                    "replacement another key."
                )
            # A task of a canvas may be sent at any time: it has no deadline.
            lost_ms = publishing.lost_after_ms(sig.options) if parts == [sig] else None
            give_back(run, requeue_ms=lost_ms)
        try:
            return super().replace(sig)
        except Ignore:
            run.replaced = run.phase is not Phase.RELEASED
            raise

    # -- inside and around ---------------------------------------------------------------------------------------------

    @property
    def idempotency(self) -> Claim:
        """The claim of the run in progress: ``self.idempotency.key``, ``.token``, ``.step()`` in a bound task.

        In a function call or a task that is switched off it holds nothing: its token is 0, its steps just run.
        """
        if (claim := current_claim()) is not None:
            return claim
        request: Any = self.request
        args, kwargs = request.args or (), request.kwargs or {}
        return unguarded(Delivery(self, self._defined(), request, args, kwargs))

    # -- records -------------------------------------------------------------------------------------------------------

    def idempotency_record(self, key: object, *, scope: object = None) -> Record | None:
        """Return the record of a key of this task, or ``None``."""
        return get_store(self.app).get(self._defined().identifier.identity(key, scope))

    def idempotency_forget(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Delete the record of a key of this task: the next call with it runs again.

        All operations return ``False`` where there was nothing to do. ``who`` is this process by default. A live owner
        loses the key only with ``force=True`` and a reason.

        Raises:
            InProgress: if a live owner holds the key, and this is not forced.
            InvalidKey: if the key or scope cannot be used.
            StoreUnavailable: if the store did not answer.
        """
        return self._operate(OperationRequest("forget", **how), key, scope)

    def idempotency_release(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """End the claim of a key of this task: the next delivery or call runs."""
        return self._operate(OperationRequest("release", **how), key, scope)

    def idempotency_requeue(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Run a failed or unfinished call again, if its record keeps the message."""
        return self._operate(OperationRequest("requeue", **how), key, scope)

    def idempotency_complete(
        self, key: object, value: object, *, scope: object = None, **how: Unpack[How]
    ) -> bool:
        """Settle a key of this task as COMPLETED: callers get ``value``. To replace an end, force it with a reason.

        Raises:
            ValueError: if it replaces an end unforced, or the value cannot be written or is too large.
        """
        stored = self._defined().codec.dump_given(value)
        return self._operate(OperationRequest("complete", value=stored, **how), key, scope)

    def idempotency_fail(self, key: object, *, scope: object = None, **how: Unpack[How]) -> bool:
        """Settle an unfinished key of this task as FAILED: callers get ``FailedByOperator``."""
        return self._operate(OperationRequest("fail", **how), key, scope)

    def _operate(self, request: OperationRequest, key: object, scope: object) -> bool:
        return operate_or_raise(self.app, self._defined().identifier.identity(key, scope), request)


def _refuse_misspelt(task: IdempotentTask, options: Options) -> None:
    """Raise ``InvalidOption`` for an unknown option of a call, unless it is a stamp of Celery's."""
    names = options.keys() - set(options.get("stamped_headers") or ())
    given = [name.removeprefix(PREFIX) for name in sorted(names) if name.startswith(PREFIX)]
    known = [name.removeprefix(PREFIX) for name in stamp.CALL_OPTIONS]
    refuse_unknown(given, known, where=f"a call of {task.name}", prefix=PREFIX)


def _has_identity(sig: AnySignature, definition: Definition, identity: Identity) -> bool:
    """Will this signature claim the same key?"""
    if sig.get("task") != definition.name:
        return False
    options = stamp.as_mapping(sig.get("options"))
    headers = stamp.as_mapping(options.get("headers"))
    headers |= {name: options[name] for name in stamp.CALL_OPTIONS if name in options}
    found = identify_delivery(definition, headers, sig["args"], sig["kwargs"], task_id="")
    return found.identity == identity


def _claiming_first(found: Any) -> Any:
    """Return a ``__call__`` that claims the key and calls ``found``, that of another base."""

    def __call__(self: IdempotentTask, *args: object, **kwargs: object) -> Any:  # noqa: N807
        call_next, request = found.__get__(self, type(self)), self.request
        definition = self.idempotency_definition()
        if definition is None or request.called_directly or delivery_of(request) is not None:
            return call_next(*args, **kwargs)
        return deliver(Delivery(self, definition, request, args, kwargs), call_next)

    return __call__


# -- what listens to Celery, from the first idempotent task of a process on; docs/differences.md lists it --------------


def make_store(sender: Any, **_: object) -> None:
    """Note the pool's time limit and make the store, or end a worker that could run no task."""
    from celery_idempotent.celery.checks import check_or_raise

    delivery.pool_time_limits[real_app(sender.app)] = sender.time_limit
    try:
        check_or_raise(sender.app)
    except Exception as error:
        raise SystemExit(f"idempotency: this worker does not start: {error}") from error


def check_setup(sender: Consumer, **_: object) -> None:
    """Check how the worker is set up; log what is found."""
    if definitions(sender.app):
        from celery_idempotent.celery.checks import check_in_thread

        check_in_thread(sender.app)


@cache
def _connect_receivers() -> None:
    for signal, receiver in (
        (celery_signals.worker_init, make_store),
        (celery_signals.worker_ready, check_setup),
        # Of a pool's process, and of the main one.
        (celery_signals.worker_process_shutdown, lambda **_: heartbeat.finish()),
        (celery_signals.worker_shutdown, lambda **_: heartbeat.finish()),
    ):
        signal.connect(receiver, weak=False)
