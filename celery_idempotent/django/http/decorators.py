"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines and the methods of views that handle requests.

Who calls is known before the claim: a function has its user from Django's middleware, and Django REST framework calls a
handler after authentication, permissions and throttles::

    function, coroutine             key ─ claim ─ the view
    handler of Django               dispatch() ─ key ─ claim ─ the handler
    handler of REST framework       authentication, permissions, throttles ─ key ─ claim ─ the handler
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.signals import setting_changed

from celery_idempotent.django.applications import APP_SETTING
from celery_idempotent.django.http.bodies import TOO_LARGE, body_too_large, receive
from celery_idempotent.django.http.guards import Guard, Guarded
from celery_idempotent.django.http.messages import refusal
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
    non_atomic_databases,
    roll_back_requests,
    unwrapped,
)
from celery_idempotent.errors import InvalidOption
from celery_idempotent.http.keys import read_key
from celery_idempotent.http.problems import RequestRefused

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponseBase

logger = logging.getLogger(__name__)

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
