"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines, class-based views and their methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import connections

from celery_idempotent.django.http.bodies import TOO_LARGE, body_too_large, receive
from celery_idempotent.django.http.ending import to_the_end
from celery_idempotent.django.http.guards import Guarded
from celery_idempotent.django.http.headers import read_key
from celery_idempotent.django.http.options import HttpOptions, refuse_idle
from celery_idempotent.django.http.problems import RequestRefused
from celery_idempotent.django.http.transactions import (
    atomic_requests,
    non_atomic_databases,
    roll_back_requests,
    unwrapped,
)
from celery_idempotent.django.http.views import Marks
from celery_idempotent.errors import InvalidOption

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponseBase

#: A view function, a method that handles requests, or a class of views.
ViewFunction = Callable[..., Any]
View = TypeVar("View", bound=ViewFunction)


@overload
def idempotent_view(view: View, /, **options: object) -> View: ...
@overload
def idempotent_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def idempotent_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Let a view take effect once for each ``Idempotency-Key`` of a caller; a repetition gets the first answer.

    ``@idempotent_view`` or ``@idempotent_view(required=False, ...)``, over a view function, a coroutine, a class-based
    view, an ``APIView`` or ``ViewSet`` of Django REST framework, or one of their methods. See
    :class:`~celery_idempotent.django.http.options.HttpOptions` for the options.

    Raises:
        InvalidOption: for an unknown option, or a bad value.
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
    refuse_idle(options, "idempotent" if guards else "keyed")

    def decorate(target: View) -> View:
        name = f"{target.__module__}.{target.__qualname__}"
        return cast("View", _decorate(target, Marks(name, options, guards=guards)))

    return decorate if view is None else decorate(view)


def _decorate(target: ViewFunction, marks: Marks) -> object:
    if isinstance(target, type):
        return _class(target, marks)
    rest: Any = getattr(target, "cls", None)
    if _is_rest(rest):
        # A view that @api_view or as_view() made: who calls is known only inside of it.
        made = _class(type(rest.__name__, (rest,), {"__module__": rest.__module__}), marks)
        actions = getattr(target, "actions", None)
        again = made.as_view(*([actions] if actions else []), **getattr(target, "initkwargs", {}))
        return wraps(target, updated=())(again)
    return _function(target, marks)


def _is_rest(cls: object) -> bool:
    """Is this a view class of Django REST framework? Not imported: what it is not installed for has none."""
    return isinstance(cls, type) and hasattr(cls, "initialize_request")


def _class(cls: Any, marks: Marks) -> Any:
    if not hasattr(cls, "dispatch"):
        raise InvalidOption(
            f"{cls.__name__} is no class of views: it has no dispatch(). Decorate a class-based view."
        )
    if _is_rest(cls):
        _rest_class(cls, marks)
    else:
        dispatch = cls.dispatch
        # Handlers of a class may be coroutines, and dispatch() returns what they return.
        cls.dispatch = _function(dispatch, marks)
    cls.idempotency = marks
    return cls


def _rest_class(cls: Any, marks: Marks) -> None:
    """Check the key before all else, and guard the handler alone: who calls, and how often, is seen to before it."""
    dispatch, initial = cls.dispatch, cls.initial
    non_atomic = non_atomic_databases(dispatch)

    @wraps(dispatch)
    def checked(self: object, request: HttpRequest, *args: object, **kwargs: object) -> object:
        refused = _read_request(request, marks, whole=False)
        if refused is not None:
            return refused
        # With a key, the transaction is within the claim.
        within = not marks.guards or request.idempotency_key is not None  # type: ignore[attr-defined]  # ours
        try:
            with atomic_requests(frozenset(connections) if within else non_atomic):
                return dispatch(self, request, *args, **kwargs)
        except TOO_LARGE as error:
            return _too_large(request, marks.options, error)

    @wraps(initial)
    def begun(self: Any, request: Any, *args: object, **kwargs: object) -> None:
        initial(self, request, *args, **kwargs)
        name = str(request.method).lower()
        handler = getattr(self, name, None)
        if handler is not None:
            keyed = request._request.idempotency_key is not None  # noqa: SLF001  Django's own request
            within = non_atomic if keyed else frozenset(connections)
            setattr(self, name, _function(handler, marks, non_atomic=within))

    cls.dispatch = unwrapped(checked) if marks.guards else checked
    cls.initial = begun


def _function(
    view: ViewFunction, marks: Marks, *, non_atomic: frozenset[str] | None = None
) -> ViewFunction:
    """Wrap a function, a coroutine, or a method that takes a request first."""
    wrapped = _WrappedView(
        view, marks, non_atomic_databases(view) if non_atomic is None else non_atomic
    )

    @wraps(view)
    def call(*args: object, **kwargs: object) -> object:
        if getattr(args[0], "view_is_async", False):  # dispatch() returns what its handler returns
            return wrapped.await_(args, kwargs)
        return wrapped.call(args, kwargs)

    @wraps(view)
    async def await_(*args: object, **kwargs: object) -> object:
        return await wrapped.await_(args, kwargs)

    made: ViewFunction = await_ if iscoroutinefunction(view) else call
    vars(made)["idempotency"] = marks
    return unwrapped(made) if marks.guards else made


class _WrappedView:
    """A view behind the check of its key: what each call of it goes through, first step to last.

    ``non_atomic`` are the databases on which ``ATOMIC_REQUESTS`` does not hold for it.
    """

    def __init__(self, view: ViewFunction, marks: Marks, non_atomic: frozenset[str]) -> None:
        self._view = view
        self._marks = marks
        self._non_atomic = non_atomic

    def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Answer a call of a function."""
        try:
            prepared = self._prepare(args, kwargs)
            if isinstance(prepared, Guarded):
                return _final(prepared, self._marks.guard.respond(prepared))
            return self._view(*args, **kwargs) if prepared is None else prepared
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], self._marks.options, error)

    async def await_(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Answer a call of a coroutine."""
        try:
            prepared = self._prepare(args, kwargs)
            if not isinstance(prepared, Guarded):
                return await self._view(*args, **kwargs) if prepared is None else prepared

            async def run() -> Any:
                return await self._view(*args, **kwargs)

            # The protocol in the thread of this request; the view itself goes back to the event loop.
            guarded = replace(prepared, run=async_to_sync(run))
            respond = sync_to_async(self._marks.guard.respond, thread_sensitive=True)
            return await to_the_end(respond(guarded), name=self._marks.name)
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], self._marks.options, error)

    def _prepare(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Guarded | HttpResponseBase | None:
        """Read the key; return what is to be guarded, the answer to a refused request, ``None``: call the view."""
        seen, request = _request_of(args)
        refused = _read_request(request, self._marks)
        if refused is not None or not self._marks.guards:
            return refused
        if getattr(request, "idempotency_guarded", False):
            return None  # decorated twice, a view is guarded once
        key = request.idempotency_key
        # Of a method Django knows nothing: ATOMIC_REQUESTS is around it, or was switched off for its view.
        is_handler = seen is not args[0] and getattr(self._view, "__name__", "") != "dispatch"
        call = partial(self._view, *args, **kwargs)
        guarded = Guarded(
            request=request,
            seen=seen,
            key=key,
            args=args[1:] if seen is args[0] else args[2:],
            kwargs=kwargs,
            run=call if key is None else lambda: _rendered(seen, call(), kwargs),
            non_atomic=frozenset(connections) if is_handler else self._non_atomic,
        )
        return guarded if self._marks.guard.has_work(guarded) else None


def _request_of(args: tuple[object, ...]) -> tuple[Any, Any]:
    """Return the request that a function or a method is called with, and Django's own that may be within."""
    seen = args[0] if hasattr(args[0], "META") else args[1]
    return seen, getattr(seen, "_request", seen)


def _read_request(request: Any, marks: Marks, *, whole: bool = True) -> HttpResponseBase | None:
    """Read the key into ``request.idempotency_key``, and return the answer to a request that has none or a bad one.

    The body of a request that is to be queued is received here; a guard does that itself. Not ``whole``: not yet.
    """
    options = marks.options
    request.idempotency_key = None
    request.idempotency_options = options
    if request.method not in options.methods or options.mode == "off":
        return None
    try:
        request.idempotency_key = read_key(
            request, strict=options.strict, required=options.required
        )
        if whole and not marks.guards:
            receive(request, options)
    except RequestRefused as refused:
        return refused.response(options.docs_url)
    return None


def _too_large(request: HttpRequest, options: HttpOptions, error: Exception) -> HttpResponseBase:
    """Answer a request over one of Django's own limits, for which Django has a page."""
    if request.method not in options.methods:
        raise error
    roll_back_requests()
    return body_too_large().response(options.docs_url)


def _rest_view(seen: HttpRequest) -> Any:
    """Return the view of Django REST framework that handles a request, ``None`` of any other kind."""
    view = (getattr(seen, "parser_context", None) or {}).get("view")
    return view if hasattr(view, "finalize_response") else None


def _rendered(
    seen: HttpRequest, response: HttpResponseBase, kwargs: dict[str, object]
) -> HttpResponseBase:
    """Let Django REST framework finish its response now: its bytes are what is kept."""
    view = _rest_view(seen)
    return response if view is None else view.finalize_response(seen, response, **kwargs)


def _final(guarded: Guarded, response: HttpResponseBase) -> HttpResponseBase:
    """Keep Django REST framework from finishing once more what is finished, or a replay, which has no data."""
    view = _rest_view(guarded.seen)
    if view is None or guarded.key is None or not getattr(response, "is_rendered", True):
        return response
    finalize = view.finalize_response

    def once(request: HttpRequest, made: object, *args: object, **kwargs: object) -> object:
        return made if made is response else finalize(request, made, *args, **kwargs)

    view.finalize_response = once
    return response
