"""``IdempotentTask``: translates between Celery and the runner, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.functional import maybe_list

from celery_idempotent.celery import (
    installation,
    publishing,
    replacing,
    republish,
    running,
)
from celery_idempotent.celery.definition import Definition, define, is_celerys_own
from celery_idempotent.celery.delivery import current_due
from celery_idempotent.celery.entering import Entry, entry_of, put_claim_first, repeatable
from celery_idempotent.celery.record_methods import RecordMethods
from celery_idempotent.celery.typed import Result, Sig
from celery_idempotent.celery.undelivered import BackendAfterSettle
from celery_idempotent.errors import (
    FingerprintMismatch,
    IdempotencyError,
    InProgress,
    InvalidOption,
)
from celery_idempotent.protocol.claim import Claim, Phase, current_claim
from celery_idempotent.protocol.policy import PREFIX, Policy, is_explicit
from celery_idempotent.settings import real_app

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from celery_idempotent.protocol.calls import OnCommit
    from celery_idempotent.stores.base import Store


class IdempotentTask(RecordMethods):
    """A task that takes effect once for each idempotency key.

    Use it as ``@app.task(base=IdempotentTask, idempotency_key="order_id")``, or for a whole app as
    ``Celery(task_cls="celery_idempotent:IdempotentTask")``. Messages are acknowledged late and come back when their
    worker is lost, unless the task or the app says otherwise: the record then makes the second delivery harmless.
    """

    abstract = True
    # Not set: bind() does, unless the app has a setting.
    acks_late: bool = None  # type: ignore[assignment]
    reject_on_worker_lost: bool | None = None
    Request = "celery_idempotent.celery.request:Request"

    #: The acknowledgement options that the task does not set itself.
    _open: tuple[str, ...]

    #: Assigned whole, as the last step: Celery lets other threads see a task that is half bound.
    _definition: Definition | None = None

    # -- definition ----------------------------------------------------------------------------------------------------

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Connect to ``app``, and check every option.

        Raises:
            InvalidOption: if an ``idempotency_*`` attribute or setting is unknown or has a bad value.
        """
        off = getattr(cls, "idempotency_mode", app.conf.get("idempotency_mode")) == "off"
        if "_open" not in vars(cls):
            acks = ("acks_late", "reject_on_worker_lost")
            cls._open = tuple(name for name in acks if getattr(cls, name) is None)
        for attribute in cls._open:
            ours = not off and not is_explicit(app, f"task_{attribute}")
            setattr(cls, attribute, True if ours else None)  # None: Celery's bind does
        if not off:
            # Expected: Celery logs them at INFO, without a traceback.
            known = dict.fromkeys([*maybe_list(cls.throws), FingerprintMismatch, InProgress])
            cls.throws = tuple(known)
        app = real_app(app)
        bound: Celery = super().bind(app)
        if not is_celerys_own(cls):
            installation.install_tasks(app)
            put_claim_first(cls, vars(IdempotentTask)["__call__"], IdempotentTask._enter)
            cls._definition = define(cls, IdempotentTask, app)
        return bound

    def _defined(self) -> Definition | None:
        """Return what :meth:`bind` found; ``None``: left alone.

        Celery's lazy finalize shows a task to other threads while one thread is still binding it. To bind it here, too,
        does no harm, and then nothing is published unstamped, or through whatever app is current in this thread.
        """
        if self._definition is None and not is_celerys_own(self):
            self.bind(self.app)
        return self._definition

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; options are read when the task is defined.

        Raises:
            InvalidOption: for an option.
        """
        if name.startswith(PREFIX):
            raise InvalidOption(f"{name} of task {self.name} is read when the task is defined.")
        super().__setattr__(name, value)

    def idempotency_definition(self) -> Definition | None:
        """Return the definition of a task that is not left alone, nor switched off."""
        definition = self._defined()
        return None if definition is None or definition.policy.mode == "off" else definition

    @property
    def idempotency_policy(self) -> Policy:
        """The checked options of this task.

        Raises:
            IdempotencyError: for one of Celery's own tasks.
        """
        return self._ours().policy

    def _ours(self) -> Definition:
        definition = self._defined()
        if definition is None:
            raise IdempotencyError(f"{self.name} is Celery's own task and runs as Celery runs it.")
        return definition

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
    ) -> Result:
        """Publish, with the key and the fingerprint computed now and stamped on the message.

        Takes ``idempotency_key`` and ``idempotency_scope`` beside Celery's options.

        Raises:
            InvalidKey: if the key or scope cannot be used, or is missing where one is required.
        """
        definition = self.idempotency_definition()
        options |= {"task_id": task_id, "producer": producer, "shadow": shadow}
        options |= {"link": link, "link_error": link_error}
        send: publishing.Send = super().apply_async
        if definition is not None:
            return publishing.publish(self, definition, send, args, kwargs, options)
        intercept = publishing.take_interceptor()
        if not is_celerys_own(self):
            publishing.take_key(options)
        if intercept is not None:
            call = publishing.DeferredCall(args=args, kwargs=kwargs, options=options)
            return intercept(self, call)
        return send(args, kwargs, **options)

    def send_deferred(self, call: publishing.DeferredCall) -> Result:
        """Send a call that an outbox deferred: this went through every ``apply_async`` above when it was made."""
        definition = self.idempotency_definition()
        return publishing.send_deferred(self, definition, super().apply_async, call)

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run here and now, by the same protocol; takes ``idempotency_key`` and ``idempotency_scope`` too."""
        definition = self.idempotency_definition()
        if definition is not None:
            publishing.stamp_call(definition, args, kwargs, options, eager=True)
        return super().apply(args, kwargs, *rest, **options)

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run once: in a worker (and ``apply``) by the protocol; called as a function, as a function."""
        request = self.request
        entry = entry_of(request)
        if entry is None:
            return self._enter(None, args, kwargs, request)
        # After the bases in front of this one; or the body calls its own task.
        way = super().__call__ if entry.arrived else self._last_step(entry)
        return way(*args, **kwargs)

    def _enter(
        self,
        way: Callable[..., object] | None,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        request: Context | None = None,
    ) -> object:
        """Go ``way`` to ``run`` (``None``: no base is in front of this one), under a claim if this is a delivery."""
        if request is None:
            request = self.request
        definition = self.idempotency_definition()
        if definition is None or request.called_directly or entry_of(request):
            return (way or super().__call__)(*args, **kwargs)
        current_due.set(None)
        with Entry(request, overridden=definition.overridden) as entry:
            way = way or self._last_step(entry)
            if definition.policy.atomic:
                body = repeatable(way, args, kwargs, eager=bool(request.is_eager))
            else:
                body = partial(way, *args, **kwargs)
            while True:
                try:
                    call = running.call_of(self, definition, request, args, kwargs)
                    return running.run_once(self, definition, request, call, body)
                except republish.StaysError:  # noqa: PERF203  after a pause; what ran is recorded
                    continue

    def _last_step(self, entry: Entry) -> Callable[..., object]:
        """Return what is behind this class: ``run``, or another base on the way to it."""
        entry.arrived = True
        if entry.overridden:
            return super().__call__
        # Celery's own mark on a request whose body is entered: a task that calls itself is a plain call.
        entry.request._protected = 1  # type: ignore[attr-defined]  # noqa: SLF001
        return self.run

    @property
    def backend(self) -> Any:
        """The result backend, as with any task; between the settle and the end of the delivery, a view of it."""
        due = current_due.get()
        backend = super().backend
        return backend if due is None else BackendAfterSettle(backend, due)

    @backend.setter
    def backend(self, backend: object) -> None:
        behind: Any = super(
            IdempotentTask, type(self)
        ).backend  # a property, whatever its stub says
        behind.fset(self, backend)

    def transactions_around(self, store: Store) -> Sequence[OnCommit]:  # noqa: ARG002
        """Return the ``on_commit`` of each transaction that an eager run is in; none if its record is part of one."""
        return ()

    def replace(self, sig: Sig) -> Any:
        """Replace this task with another, as Celery does; the record is completed as *replaced*."""
        definition = self._defined()
        if definition is None:
            return super().replace(sig)
        return replacing.replace(self, definition, sig, super().replace)

    def on_replace(self, sig: Sig) -> Any:
        """Publish the replacement, unless a transaction is open that may still be rolled back."""
        replacing.refuse_in_transaction(self)
        return super().on_replace(sig)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry, as Celery does; the key is released before the retry is published."""
        outcome = super().retry(*args, **kwargs)
        # Only throw=False comes here. An eager retry is not published but run when this run is over.
        claim = current_claim()
        if claim is not None and self.request.is_eager and claim.phase is not Phase.RELEASED:
            if claim.transaction is not None:
                claim.after_rollback = lambda: self._ours().runner.release(claim)
            else:
                self._ours().runner.release(claim)
        return outcome

    # -- inside and around ---------------------------------------------------------------------------------------------

    @property
    def idempotency(self) -> Claim:
        """The claim of the run in progress: ``self.idempotency.key``, ``.token``, ``.step()`` in a bound task.

        Where a task runs without one (called as a function, or with protection switched off) this is a claim that holds
        nothing: it knows the key, its token is 0, its steps just run.
        """
        claim = current_claim()
        if claim is not None:
            return claim
        definition, request = self._ours(), self.request
        call = running.call_of(self, definition, request, request.args or (), request.kwargs or {})
        return definition.runner.unguarded_claim(call)
