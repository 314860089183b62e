"""``IdempotentTask``: translates between Celery and the runner, and back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry
from celery.utils import uuid

from celery_idempotent.celery import (
    autoretry,
    canvas,
    delivery,
    operations,
    publishing,
    reaper,
    republish,
    sending,
)
from celery_idempotent.celery.definition import Definition, define, is_celerys_own
from celery_idempotent.celery.entering import Entry, entry_of, put_claim_first, repeatable
from celery_idempotent.celery.replay import replay
from celery_idempotent.celery.typed import TaskBase
from celery_idempotent.errors import IdempotencyError, InvalidKey, InvalidOption
from celery_idempotent.identity.identified import Identified
from celery_idempotent.identity.stamp import (
    KEEP_FAILURE,
    KEY_HEADER,
    RAW_KEY,
    RAW_SCOPE,
    SCOPE_HEADER,
    as_mapping,
    message_id,
    read_stamp,
    stamp_of,
    with_stamp,
)
from celery_idempotent.identity.trees import canvas_tasks, unstamp
from celery_idempotent.protocol.calls import Call, Conflict, Ran, Replay, StoreFailed, worker_name
from celery_idempotent.protocol.claim import Claim, current_claim
from celery_idempotent.protocol.policy import PREFIX, Policy, is_explicit
from celery_idempotent.records import Identity, Record
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context
    from celery.canvas import Signature

    from celery_idempotent.protocol.deferred import OnCommit
    from celery_idempotent.stores.base import Store

__all__ = ["IdempotentTask"]

logger = logging.getLogger(__name__)

canvas.install()


def _id_of_call(task: IdempotentTask, request: Context) -> str:
    """Return an id for a call as a function, which has none: the same for as long as the call lasts."""
    if request is not task.request_stack.top:
        return uuid()  # of run() itself, whose calls share one request
    made: str = vars(request).setdefault("idempotency_call", uuid())
    return made


def _is_failure(error: BaseException) -> bool:
    """Is the task over for good? A retry is not, nor is a run that Celery hands back or forgets."""
    return isinstance(error, Exception) and not isinstance(error, (Ignore, Reject, Retry))


class IdempotentTask(TaskBase):
    """A task that takes effect once for each idempotency key.

    Use it as ``@app.task(base=IdempotentTask, idempotency_key="order_id")``, or for a whole app as
    ``Celery(task_cls="celery_idempotent:IdempotentTask")``. Messages are acknowledged late and come back when their
    worker is lost, unless the task or the app says otherwise: the record then makes the second delivery harmless.
    """

    abstract = True
    # Not set: bind() does, unless the app has a setting.
    acks_late = None  # type: ignore[assignment]
    reject_on_worker_lost = None
    Request = "celery_idempotent.celery.request:Request"

    #: Which of its acknowledgement options the task leaves open.
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
        app = getattr(app, "_get_current_object", lambda: app)()  # not a proxy of it
        bound: Celery = super().bind(app)
        if not is_celerys_own(cls):
            reaper.install(app)
            put_claim_first(cls, vars(IdempotentTask)["__call__"], IdempotentTask._enter)
            cls._definition = define(cls, IdempotentTask, app)
        return bound

    def _defined(self) -> Definition | None:
        """Return what :meth:`bind` found; ``None``: left alone.

        Celery's lazy finalize shows a task to other threads while one thread is still binding it. To bind it here, too,
        does no harm, and then nothing is published unstamped, or through whatever app is current in this thread.

        Nor does it where settings are others by now.
        """
        definition = self._definition
        if definition is None or not definition.settings.holds(self.app):
            if is_celerys_own(self):
                return None
            self.bind(self.app)
        return self._definition

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; an option takes effect, or is refused.

        Raises:
            InvalidOption: for a bad value.
        """
        if not name.startswith(PREFIX) or self._definition is None:
            return super().__setattr__(name, value)
        before = {name: vars(type(self))[name]} if name in vars(type(self)) else {}
        setattr(type(self), name, value)
        try:
            self.bind(self.app)
        except InvalidOption:
            delattr(type(self), name)
            for known, option in before.items():
                setattr(type(self), known, option)
            raise
        return None

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
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Publish, with the key and the fingerprint computed now and stamped on the message.

        Takes ``idempotency_key`` and ``idempotency_scope`` beside Celery's options.

        Raises:
            InvalidKey: if the key or scope cannot be used, or is missing where one is required.
        """
        definition = self.idempotency_definition()
        options |= {"task_id": task_id, "producer": producer, "shadow": shadow}
        options |= {"link": link, "link_error": link_error}
        if definition is not None:
            return publishing.publish(self, definition, super().apply_async, args, kwargs, options)
        keep = publishing.take_keeper()
        if not is_celerys_own(self):
            publishing.drop_key(options)
        if keep is not None:
            return keep(self, publishing.Kept(args=args, kwargs=kwargs, options=options))
        return super().apply_async(args, kwargs, **options)

    def send_kept(self, kept: publishing.Kept) -> Any:
        """Send a call that an outbox kept; every ``apply_async`` above this one had its say when it was made."""
        return publishing.send_kept(self, self.idempotency_definition(), super().apply_async, kept)

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run here and now, by the same protocol; takes ``idempotency_key`` and ``idempotency_scope`` too."""
        definition = self.idempotency_definition()
        if definition is not None:
            publishing.identify(definition, args, kwargs, options, eager=True)
        return super().apply(args, kwargs, *rest, **options)

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once: in a worker (and ``apply``) by the protocol; called as a function, as a function."""
        entry = entry_of(self.request)
        if entry is None:
            return self._enter(None, args, kwargs)
        # After the bases in front of this one; or the body calls its own task.
        way = super().__call__ if entry.arrived else self._last_step(entry)
        return way(*args, **kwargs)

    def _enter(self, way: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Go ``way`` to ``run`` (``None``: no base is in front of this one), under a claim if this is a delivery."""
        request: Any = self.request
        definition = self.idempotency_definition()
        if definition is None or request.called_directly or entry_of(request):
            return (way or super().__call__)(*args, **kwargs)
        with Entry(request) as entry:
            made = repeatable if definition.policy.atomic else partial
            body = made(way or self._last_step(entry), *args, **kwargs)
            while True:
                try:
                    call = self._call(definition, request, args, kwargs)
                    run = partial(self._run_once, definition, request, call, body)
                    return sending.answer(self, request, run)
                except republish.StaysError:  # noqa: PERF203  after a pause; what ran is recorded
                    continue

    def _last_step(self, entry: Entry) -> Callable[..., Any]:
        """Return what is behind this class: ``run``, or another base on the way to it."""
        entry.arrived = True
        if self._ours().overridden:
            return super().__call__
        # Celery's own mark on a request whose body is entered: a task that calls itself is a plain call.
        self.request._protected = 1  # type: ignore[attr-defined]  # noqa: SLF001
        return self.run

    def _run_once(  # noqa: RET503
        self, definition: Definition, request: Any, call: Call, body: Callable[[], Any]
    ) -> Any:
        """Act on what the protocol says; raises StaysError if it is to be asked again."""
        match definition.runner.execute(call, body):
            case Ran(value):
                return value
            case Replay(record, age_ms):
                return replay(self, definition, request, record, age_ms)
            case Conflict(record, left_ms, other):
                republish.conflict(self, request, record, left_ms, other=other)
            case StoreFailed(error, attempt, condemned):
                if condemned or self.idempotency_policy.on_store_error != "open":
                    republish.store_failed(self, request, error, attempt)
                logger.warning(
                    "idempotency: %s[%s] runs without protection: %s",
                    self.name,
                    request.id,
                    error,
                )
                return definition.runner.unguarded(call, body)

    def _call(
        self,
        definition: Definition,
        request: Context,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Call:
        task_id = str(request.id or _id_of_call(self, request))
        headers = as_mapping(request.headers)
        said = read_stamp(headers, task_id)
        identified = self.identify_delivery(
            {**as_mapping(request.stamps), **headers},
            args,
            kwargs,
            task_id=task_id,
            nesting=request.replaced_task_nesting or 0,
            eager=bool(request.is_eager),
        )
        identity = identified.identity
        if {RAW_KEY, RAW_SCOPE, KEEP_FAILURE} & said.keys():
            # From here on they are this message's alone: the body may hand its headers to other calls.
            request.headers = with_stamp(headers, task_id, identified)
        noted = None
        if definition.policy.mode == "enforce" and delivery.sends_on(request):
            noted = partial(self._expect_sending, request, identity)
        return Call(
            identity=identity,
            fingerprint=identified.fingerprint,
            before=identified.before,
            task_id=task_id,
            worker=worker_name(os.getpid()),
            longest_wait_ms=republish.longest_wait_ms(self, request),
            on_settled=noted,
            message=self._message(definition, request),
            unanswered=republish.unanswered(said),
            on_late_error=partial(autoretry.outcome, self),
            around=self.transactions_around if request.is_eager else None,
            is_failure=_is_failure if KEEP_FAILURE in said else None,
        )

    def _expect_sending(self, request: Context, identity: Identity, token: int) -> None:
        mark = delivery.marking(get_store(self.app), identity, token)
        delivery.expect(request, delivery.Due(mark=mark))

    def _message(self, definition: Definition, request: Context) -> bytes | None:
        """Return this message as a sweep would publish it again, if the policy wants that."""
        if definition.policy.on_stale != "requeue" or request.is_eager:
            return None
        again = self.signature_from_request(
            request,
            retries=request.retries,
            # As a message that goes round again: the operation has begun in time.
            expires=None,
            add_to_parent=False,
            **republish.as_published(request),
        )
        return definition.codec.dump_message(again)

    def identify_delivery(
        self,
        headers: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str,
        nesting: int = 0,
        eager: bool = False,
    ) -> Identified:
        """Return what a message is about: its stamp, else what its publisher's headers or its arguments say.

        An eager call without a key gets a key of its own: Celery gives all steps of an eager chain one task id.

        Raises:
            InvalidKey: if the stamp is malformed, or the key cannot be used.
        """
        definition = self._ours()
        said = read_stamp(headers, task_id)
        about: dict[str, Any] = {"task_id": uuid() if eager else message_id(headers, task_id)}
        about["nesting"] = nesting
        try:
            header = stamp_of(headers, task_id)
            stamped = definition.identifier.stamped(header, args, kwargs, **about)
        except InvalidKey as error:
            if definition.policy.mode != "observe":
                raise
            return definition.observed(error, task_id)
        if stamped is not None:
            return stamped
        return definition.identify(
            args, kwargs, **about, key=said.get(RAW_KEY), scope=said.get(RAW_SCOPE)
        )

    def transactions_around(self, store: Store) -> Sequence[OnCommit]:  # noqa: ARG002
        """Return how to be called at the commit of each transaction that an eager run is in, and its record not."""
        return ()

    def replace(self, sig: Signature[Any]) -> Any:
        """Replace this task with another, as Celery does; the record is completed as *replaced*."""
        claim = current_claim()
        unstamp(sig, self.request.id)
        if claim is None or claim.record.task_id != self.request.id:
            return super().replace(sig)
        definition = self._ours()
        parts = list(canvas_tasks(sig))
        if any(self._is_about(part, claim.record.identity) for part in parts):
            # A replacement with our own key must find it free.
            if claim.transaction is not None:
                raise IdempotencyError(
                    f"{self.name} is atomic, and cannot be replaced by a call with its own key, which is not free "
                    "before its transaction is committed: give the replacement a key of its own."
                )
            # Of a canvas nobody knows when its turn comes: until then its message must not be taken for lost.
            lost_ms = publishing.until_lost(sig.options) if parts == [sig] else None
            definition.runner.release(claim, requeue_ms=lost_ms)
        if claim.given_back or self.request.is_eager:
            return super().replace(sig)
        claim.replaced = True
        try:
            return super().replace(sig)
        except Ignore:
            raise
        except BaseException:
            claim.replaced = False
            raise

    def on_replace(self, sig: Signature[Any]) -> Any:
        """Let the replacement be published once the record has it: it is never lost, and run() is not repeated."""
        claim = current_claim()
        if claim is not None and claim.transaction is not None and not self.request.is_eager:
            raise IdempotencyError(
                f"{self.name} is atomic, and its replacement has to be staged in its transaction: take "
                "celery_idempotent.django.IdempotentTask as its base."
            )
        if claim is not None and claim.replaced and self.idempotency_policy.mode == "enforce":
            claim.replacement = self._ours().codec.dump_replacement(sig)
            if claim.replacement is not None:
                held = claim.store, claim.record.identity, claim.token
                due = delivery.Due(mark=delivery.marking(*held))
                raise delivery.Replaced(sig, due, delivery.forgetting(*held))
        return super().on_replace(sig)

    def _is_about(self, sig: Mapping[str, Any], identity: Identity) -> bool:
        """Will this signature claim the same key?"""
        if sig.get("task") != self.name:
            return False
        options: dict[str, Any] = dict(sig.get("options") or {})
        said = read_stamp(as_mapping(options.get("headers")), None)
        identified = self._ours().identifier.identify(
            sig.get("args"),
            sig.get("kwargs"),
            task_id="",
            key=options.get(KEY_HEADER, said.get(RAW_KEY)),
            scope=options.get(SCOPE_HEADER, said.get(RAW_SCOPE)),
        )
        return identified.identity == identity

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry, as Celery does; the key is free before the retry is on its way."""
        outcome = super().retry(*args, **kwargs)
        # Only throw=False comes here. An eager retry is not published but run when this run is over.
        claim = current_claim()
        if claim is not None and self.request.is_eager and not claim.given_back:
            if claim.transaction is not None:
                claim.afterwards = lambda: self._ours().runner.release(claim)
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
        request: Any = self.request
        call = self._call(self._ours(), request, request.args or (), request.kwargs or {})
        return self._ours().runner.unguarded_claim(call)

    def idempotency_record(self, key: Any, *, scope: Any = None) -> Record | None:
        """Return the record of a key of this task, or ``None``.

        Raises:
            InvalidKey: if the key or scope cannot be used.
            StoreUnavailable: if the store did not answer.
        """
        store = get_store(self.app)
        return next(filter(None, map(store.get, self._identities(key, scope))), None)

    def idempotency_forget(
        self, key: Any, *, scope: Any = None, reason: str = "", who: str = "", force: bool = False
    ) -> bool:
        """Delete the record of a key of this task: the next call with it runs again. ``False`` if there was none.

        The log and the signal ``forgotten`` tell who did it (this process, if nobody is named) and the reason. To take
        the key away from a live owner, who may still be at work, this has to be forced, with a reason.

        Raises:
            InProgress: if an owner within its lease holds the key, and this is not forced.
            InvalidKey: if the key or scope cannot be used.
            StoreUnavailable: if the store did not answer.
        """
        who = who or worker_name(os.getpid())
        forget = partial(operations.forget, self.app, force=force, who=who, reason=reason)
        return True in [forget(identity) for identity in self._identities(key, scope)]

    def _identities(self, key: Any, scope: Any) -> list[Identity]:
        """Return the identity of a key, and what it was in the namespace of before a deploy."""
        identifier = self._ours().identifier
        identified = identifier.renamed(Identified(identifier.identity(key, scope)))
        before = identified.before
        return [identified.identity, *([before.identity] if before else [])]
