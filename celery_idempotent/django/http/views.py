"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines and the methods of views that handle requests.

Who calls is known before the claim: a function has its user from Django's middleware, and Django REST framework calls a
handler after authentication, permissions and throttles::

    function, coroutine             key ─ claim ─ the view
    handler of Django               dispatch() ─ key ─ claim ─ the handler
    handler of REST framework       authentication, permissions, throttles ─ key ─ claim ─ the handler

::

    with a key   body ─ claim ─┬─ Claimed ────▶ the view, in its transactions ─ settle with the response
                                       ├─ Settled ────▶ may this caller have it? then the stored response
                                       ├─ Held ───────▶ 409, Retry-After
                                       ├─ Mismatched ─▶ 422
                                       └─ no answer ──▶ 503
    without      the view, in its transactions

To the protocol the view is a body. A response that is not one to repeat (a 503, for instance) leaves that body as an
exception, and so the key is released, as after any failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import PermissionDenied
from django.core.signals import setting_changed
from django.http import HttpRequest, HttpResponseBase

from celery_idempotent.django.applications import APP_SETTING, app_of, named_app
from celery_idempotent.django.http.bodies import (
    TOO_LARGE,
    body_too_large,
    receive,
    request_fingerprint,
)
from celery_idempotent.django.http.callers import caller_scope
from celery_idempotent.django.http.messages import (
    awaited,
    pack_response,
    problem,
    read_response,
    refusal,
    response_of,
)
from celery_idempotent.django.http.options import (
    HTTP_NAMESPACE,
    HTTP_SETTING,
    KEY_META,
    METHODS,
    HttpOptions,
    http_options,
    refuse_unused,
)
from celery_idempotent.django.http.transactions import (
    atomic_aliases,
    atomic_requests,
    non_atomic_databases,
    refuse_open_transactions,
    roll_back_requests,
    unwrapped,
)
from celery_idempotent.errors import (
    FingerprintMismatch,
    IdempotencyError,
    InvalidOption,
    ResultUnavailable,
)
from celery_idempotent.events import Reporter, worker_name
from celery_idempotent.http.describing import failure_of
from celery_idempotent.http.keys import http_identity, read_key
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import Identity, Record, Stored
from celery_idempotent.serializers import NotStored, Serializer
from celery_idempotent.stores import Store, get_store

logger = logging.getLogger(__name__)


def object_permissions(request: HttpRequest, *_: object, **__: object) -> bool:
    """Ask what a view of Django REST framework about one object asks: its ``get_object()``.

    For ``@idempotent_view(authorize=object_permissions)``: a caller who no longer gets the object from
    ``get_queryset()``, or is refused by a ``has_object_permission()``, gets the framework's 404 or 403. An action of a
    router that is about no object (``create``) has nothing to ask.

    Raises:
        InvalidOption: for a view that has no ``get_object()``.
    """
    view: Any = getattr(request, "parser_context", {}).get("view")
    if getattr(view, "detail", None) is False:
        return True
    if not hasattr(view, "get_object"):
        raise InvalidOption(
            "authorize=object_permissions is for views of Django REST framework with a get_object(); "
            "give a function of your own: authorize(request, *args, **kwargs) -> bool"
        )
    view.get_object()
    return True


class _NotToKeepError(Exception):
    """The view ran, and its answer is not one to repeat: the key is given back."""

    def __init__(self, response: HttpResponseBase) -> None:
        super().__init__(response.status_code)
        self.response = response


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """One request: ``seen`` is what its view gets, with ``args`` and ``kwargs`` of its URL; ``run`` calls the view.

    Without a key nothing is claimed. ``rest`` is the view of Django REST framework whose response ``run`` finishes.
    ``non_atomic`` are the databases on which ``ATOMIC_REQUESTS`` does not hold for this view.
    """

    request: HttpRequest
    seen: HttpRequest
    key: str | None
    run: Callable[[], HttpResponseBase]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    rest: Any = None
    non_atomic: frozenset[str] = frozenset()


class _ResponseCodec:
    """Responses instead of values; errors and steps as JSON."""

    def __init__(self, options: HttpOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._json = Serializer()

    def dump_value(self, value: HttpResponseBase) -> Stored:
        """Pack a response."""
        return pack_response(value, self._options, name=self._name)

    def dump_error(self, error: BaseException) -> Stored:
        """Store what a caller may know."""
        parts = {"exc_type": type(error).__name__, "exc_message": str(error)}
        return self._json.dump(parts)

    def dump_step(self, name: str, value: object) -> Stored:
        """Serialize the result of a step."""
        try:
            return self._json.dump(value, max_bytes=self._options.max_response_bytes)
        except NotStored as problem:
            raise IdempotencyError(
                f"The result of step {name!r} of {self._name} cannot be recorded: {problem}."
            ) from None

    def load_value(self, stored: Stored) -> object:
        """Return the result of a step."""
        return self._json.load(stored)


class _RequestRun(Run):
    """One request with a key."""

    def __init__(self, guard: Guard, guarded: Guarded, identity: Identity) -> None:
        options = guard.options
        self.guard, self.guarded, self.identity = guard, guarded, identity
        self.name, self.policy = guard.name, options.policy
        self.codec, self.reporter = guard.codec, guard.reporter
        self.fingerprint = request_fingerprint(guarded.request, guarded.seen, options)
        self.task_id = str(uuid.uuid4())
        self.worker = worker_name(os.getpid())
        if options.atomic:
            self.in_transaction = atomic.run_body

    def open_store(self) -> Store:
        """Return the store of the project."""
        return self.guard.open_store()

    def replay(self, record: Record, age_ms: int) -> object:  # noqa: ARG002
        """Repeat the stored response to a caller who may have it."""
        return self.guard.refused(self.guarded) or self.guard.replay(record)

    def conflict(self, record: Record, left_ms: int) -> NoReturn:  # noqa: ARG002
        """Refuse a request whose key another one holds."""
        raise RequestRefused(
            "request_in_progress",
            "The first request with this key has not been answered yet. Ask again later.",
        )

    def store_failed(self, error: Exception, *, begun: bool = False) -> NoReturn:
        """Refuse a request that cannot be guarded now."""
        begun = begun or getattr(self.guarded.request, "idempotency_guarded", False)
        known = (
            "It is not known yet whether it was carried out."
            if begun
            else "Whether an earlier request with this key was carried out is not known; this one was not."
        )
        raise RequestRefused(
            "store_unavailable", f"{known} Send the same request with the same key again."
        ) from error


class Guard:
    """Guards one view; ``name`` is for people, ``sender`` what signals come from."""

    def __init__(self, name: str, sender: object, options: HttpOptions) -> None:
        self.options = options
        self.name = name
        named = named_app()
        self.open_store: Callable[[], Store] = lambda: get_store(app_of(named))
        self.codec = _ResponseCodec(options, name)
        self.reporter = Reporter(name, lambda: sender, self.open_store)

    def respond(self, guarded: Guarded) -> HttpResponseBase:
        """Answer the request, from the view or from the record.

        Raises:
            Exception: what the view raises, or the reading of the body; the key is free then.
        """
        options, key = self.options, guarded.key
        try:
            if key is None:
                return self._without_key(guarded)
            receive(guarded.request, options)
            scope = caller_scope(guarded.seen, options)
            run = _RequestRun(self, guarded, http_identity(HTTP_NAMESPACE, scope, key))
            refuse_open_transactions()
            return self._execute(run, guarded)
        except RequestRefused as refused:
            return refusal(refused, options)
        finally:
            # Some middleware hands the same request to its view once more.
            guarded.request.idempotency_guarded = False  # type: ignore[attr-defined]  # ours

    def has_work(self, guarded: Guarded) -> bool:
        """Is there anything to do about this request but to call its view?"""
        due = self._is_atomic(guarded) or atomic_aliases(guarded.non_atomic)
        return guarded.key is not None or bool(due)

    def _is_atomic(self, guarded: Guarded) -> bool:
        return self.options.atomic and guarded.request.method in METHODS

    def _without_key(self, guarded: Guarded) -> HttpResponseBase:
        """Call the view without a claim; one that is ``atomic`` has its transaction all the same."""
        if not self._is_atomic(guarded):
            with atomic_requests(guarded.non_atomic):
                return response_of(guarded.run(), self.name)
        refuse_open_transactions()
        try:
            with atomic.transactional(self.open_store(), self.name).transaction(None):
                return self._run(guarded)
        except _NotToKeepError as answered:
            return answered.response

    def _execute(self, run: Run, guarded: Guarded) -> HttpResponseBase:
        try:
            return cast("HttpResponseBase", execute(run, lambda: self._run(guarded)))
        except FingerprintMismatch:
            raise RequestRefused(
                "idempotency_key_reused",
                "It was sent before with another method, route or body. A key stands for one intention: use a new one.",
            ) from None
        except _NotToKeepError as answered:
            return answered.response

    def _run(self, guarded: Guarded) -> HttpResponseBase:
        """Call the view inside the transactions that ``ATOMIC_REQUESTS`` asks for.

        They end before the key is settled: a record that says COMPLETED, and then a COMMIT that fails, would be a lie.
        """
        request: Any = guarded.request
        if getattr(request, "idempotency_guarded", False):
            # Rolled back at its end. The request is not what it was: its files are read, its user may have changed.
            raise RequestRefused(
                "rolled_back",
                "The database rolled it back: a deadlock or a serialization failure. Send the same request with"
                " the same key again.",
            )
        with atomic_requests(guarded.non_atomic):
            request.idempotency_guarded = True
            response = response_of(guarded.run(), self.name)
            if not getattr(response, "is_rendered", True):
                response = response.render()  # type: ignore[attr-defined]  # of a template
            if not self.options.is_stored(response.status_code):
                raise _NotToKeepError(response)
        return response

    def refused(self, guarded: Guarded) -> HttpResponseBase | None:
        """Return the answer to a caller who may not have the replay, ``None`` for any other.

        Raises:
            PermissionDenied: if ``authorize`` says neither yes nor what to answer.
        """
        authorize = self.options.authorize
        if authorize is None:
            return None
        found = authorize(guarded.seen, *guarded.args, **guarded.kwargs)
        found = awaited(found, f"authorize of {self.name}")
        if isinstance(found, HttpResponseBase):
            return found
        if not found:
            raise PermissionDenied
        return None

    def replay(self, record: Record) -> HttpResponseBase:
        """Return the answer that the record has."""
        if record.state.is_failure:
            code = failure_of(record, None).code
            details = {
                "failed_by_operator": "An operator decided that it is not tried again.",
                "too_many_crashes": f"The process that worked on it died {record.crashes} times, and it is not tried "
                "again.",
            }
            detail = details.get(code, "It failed for good.")
            return problem(code, detail, docs_url=self.options.docs_url)
        if record.value is None:
            raise RequestRefused("result_not_kept", "The response could not be kept.")
        try:
            return read_response(record.value)
        except ResultUnavailable as unavailable:
            raise RequestRefused("result_not_kept", str(unavailable)) from None


Value = TypeVar("Value")


async def to_the_end(work: Awaitable[Value], *, name: str) -> Value:
    """Await ``work``, which a cancellation does not reach; it is passed on when the work is done.

    Django cancels a coroutine when its client hangs up; between an effect and its record it must not::

        client       view (cancelled)           the same, to its end
        POST    ───▶ charge: done               charge: done
        hangs up ──✂ CancelledError, release    … answer, settle, CancelledError
        POST    ───▶ charge: once more          the first answer
    """
    contexts: list[Context] = []

    async def whole() -> Value:
        try:
            return await work
        finally:
            contexts.append(copy_context())

    task = asyncio.ensure_future(whole())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # noqa: PERF203  it may come more than once
            cancelled = error
    # A task has a context of its own; what the view set in it, as a language, is there for the middleware.
    for context in contexts:
        _take_over(context)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        logger.error("idempotency: %s failed, and its client has gone", name, exc_info=failure)
    raise cancelled


def _take_over(context: Context) -> None:
    here = copy_context()
    for variable, value in context.items():
        if variable not in here or here[variable] is not value:
            variable.set(value)


#: The views with ``@idempotent_view``.
_guarded: set[str] = set()

#: A view function, or a method that handles requests.
ViewFunction = Callable[..., Any]
View = TypeVar("View", bound=ViewFunction)


@overload
def idempotent_view(view: View, /, **options: object) -> View: ...
@overload
def idempotent_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def idempotent_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Let a view take effect once for each ``Idempotency-Key`` of a caller; a repetition gets the first answer.

    ``@idempotent_view`` or ``@idempotent_view(required=False, ...)``, over a view function, a coroutine, or a method
    that handles requests (``post`` of a view class, an action of a ``ViewSet``, a function below ``@api_view``). See
    :class:`~celery_idempotent.django.http.options.HttpOptions` for the options.

    Raises:
        InvalidOption: for an unknown option, a bad value, or a view class.
    """
    return _decorator(view, options, guards=True)


@overload
def keyed_view(view: View, /, **options: object) -> View: ...
@overload
def keyed_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def keyed_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Check the ``Idempotency-Key`` of a view that hands it to :func:`~celery_idempotent.django.http.enqueue`.

    A missing or malformed key is refused before anything else is looked at. Used as :func:`idempotent_view`, with the
    options that concern the header and the answers of ``enqueue()``; the rest is up to the task.

    Raises:
        InvalidOption: for an option that is unknown or does nothing here, or a bad value.
    """
    return _decorator(view, options, guards=False)


def _decorator(view: ViewFunction | None, options: dict[str, object], *, guards: bool) -> object:
    if not guards:
        refuse_unused(options)

    def decorate(target: View) -> View:
        _refuse_class(target, "idempotent_view" if guards else "keyed_view")
        return cast("View", _function(target, options, guards=guards))

    return decorate if view is None else decorate(view)


def _refuse_class(target: ViewFunction, decorator: str) -> None:
    """Refuse a class of views, and what Django REST framework makes of one: the caller is known only inside of it.

    Raises:
        InvalidOption: with what to decorate instead.
    """
    name = target.__qualname__
    if isinstance(target, type):
        raise InvalidOption(
            f"{name} is a class, and @{decorator} is for functions and handlers: decorate its post(), or the class "
            f'with @method_decorator({decorator}, name="post").'
        )
    # dispatch() of method_decorator() is known with its instance, at a request.
    inside = (
        getattr(getattr(target, "func", None), "__self__", None)
        if name.endswith(".dispatch")
        else None
    )
    if hasattr(getattr(target, "cls", inside), "initialize_request"):
        raise InvalidOption(
            f"{name} is a view of Django REST framework, which knows its caller only inside: put @{decorator} below "
            "@api_view, or on the handler or action of the class."
        )


def view_namespaces() -> list[str]:
    """Return the namespace of guarded views; none in a project that guards none."""
    return [HTTP_NAMESPACE] if _guarded else []


def _function(view: ViewFunction, given: dict[str, object], *, guards: bool) -> ViewFunction:
    """Wrap a function, a coroutine, or a method that takes a request first."""
    wrapped = WrappedView(view, given, guards=guards)

    @wraps(view)
    def call(*args: object, **kwargs: object) -> object:
        return wrapped.call(args, kwargs)

    @wraps(view)
    async def await_(*args: object, **kwargs: object) -> object:
        return await wrapped.await_(args, kwargs)

    made: ViewFunction = await_ if iscoroutinefunction(view) else call
    return unwrapped(made) if guards else made


class WrappedView:
    """A view behind the check of its key: what each call of it goes through, first step to last.

    Its options are read again when Django's settings change, as ``override_settings()`` has them do.
    """

    def __init__(self, view: ViewFunction, given: dict[str, object], *, guards: bool) -> None:
        self.name = f"{view.__module__}.{view.__qualname__}"
        self._view = view
        self._given = given
        self._guards = guards
        self._non_atomic = non_atomic_databases(view)
        self._guard: Guard | None = None
        http_options(given)  # a bad option is refused with the view
        if guards:
            _guarded.add(self.name)
        setting_changed.connect(self._forget)

    def _forget(self, *, setting: str = "", **_: object) -> None:
        if setting in (HTTP_SETTING, APP_SETTING):
            self._guard = None

    @property
    def guard(self) -> Guard:
        """What guards the view, under the settings that hold."""
        guard = self._guard
        if guard is None:
            guard = self._guard = Guard(self.name, self, http_options(self._given))
        return guard

    def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Answer a call of a function."""
        guard = self.guard
        try:
            prepared = self._prepare(guard, args, kwargs)
            if isinstance(prepared, Guarded):
                return _final(prepared, guard.respond(prepared))
            return self._view(*args, **kwargs) if prepared is None else prepared
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], guard.options, error)

    async def await_(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Answer a call of a coroutine."""
        guard = self.guard
        try:
            prepared = self._prepare(guard, args, kwargs)
            if not isinstance(prepared, Guarded):
                return await self._view(*args, **kwargs) if prepared is None else prepared

            async def run() -> Any:
                return await self._view(*args, **kwargs)

            # The protocol in the thread of this request; the view itself goes back to the event loop.
            guarded = replace(prepared, run=async_to_sync(run))
            respond = sync_to_async(guard.respond, thread_sensitive=True)
            return await to_the_end(respond(guarded), name=self.name)
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], guard.options, error)

    def _prepare(
        self, guard: Guard, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Guarded | HttpResponseBase | None:
        """Read the key; return what is to be guarded, the answer to a refused request, ``None``: call the view."""
        seen, request = _request_of(args)
        refused = _read_request(request, guard.options, receives=not self._guards)
        if refused is not None or not self._guards:
            return refused
        if getattr(request, "idempotency_guarded", False):
            return None  # decorated twice, a view is guarded once
        key = request.idempotency_key
        call = partial(self._view, *args, **kwargs)
        # Django REST framework finishes its response at once, for its bytes are what is kept.
        rest = None if key is None else _rest_view(seen)
        guarded = Guarded(
            request=request,
            seen=seen,
            key=key,
            args=args[1:] if seen is args[0] else args[2:],
            kwargs=kwargs,
            run=call if rest is None else lambda: rest.finalize_response(seen, call(), **kwargs),
            rest=rest,
            non_atomic=self._non_atomic,
        )
        return guarded if guard.has_work(guarded) else None


def _request_of(args: tuple[object, ...]) -> tuple[Any, Any]:
    """Return the request that a function or a method is called with, and Django's own that may be within."""
    seen = args[0] if hasattr(args[0], "META") else args[1]
    return seen, getattr(seen, "_request", seen)


def _read_request(
    request: Any, options: HttpOptions, *, receives: bool = False
) -> HttpResponseBase | None:
    """Read the key into ``request.idempotency_key``, and return the answer to a request that has none or a bad one.

    ``receives``: here the body is received as well, of a request that is to be queued. A guard does that itself.
    """
    request.idempotency_key = None
    request.idempotency_options = options
    if request.method not in METHODS:
        return None
    try:
        key = read_key(request.META.get(KEY_META), required=options.required)
        request.idempotency_key = key
        if receives:
            receive(request, options)
    except RequestRefused as refused:
        return refusal(refused, options)
    return None


def _too_large(request: HttpRequest, options: HttpOptions, error: Exception) -> HttpResponseBase:
    """Answer a request over one of Django's own limits, for which Django has a page."""
    if request.method not in METHODS:
        raise error
    roll_back_requests()
    return refusal(body_too_large(), options)


def _rest_view(seen: HttpRequest) -> Any:
    """Return the view of Django REST framework that handles a request, ``None`` of any other kind."""
    view = (getattr(seen, "parser_context", None) or {}).get("view")
    return view if hasattr(view, "finalize_response") else None


def _final(guarded: Guarded, response: HttpResponseBase) -> HttpResponseBase:
    """Keep Django REST framework from finishing once more what is finished, or a replay, which has no data."""
    view = guarded.rest
    if view is None or not getattr(response, "is_rendered", True):
        return response
    finalize = view.finalize_response

    def once(request: HttpRequest, made: object, *args: object, **kwargs: object) -> object:
        return made if made is response else finalize(request, made, *args, **kwargs)

    view.finalize_response = once
    return response
