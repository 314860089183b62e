"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines, class-based views and their methods."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.signals import setting_changed
from django.db import connections

from celery_idempotent.django.http import namespaces
from celery_idempotent.django.http.bodies import TOO_LARGE, receive, too_large
from celery_idempotent.django.http.describing import note_shown
from celery_idempotent.django.http.ending import to_the_end
from celery_idempotent.django.http.guards import Guard, Guarded
from celery_idempotent.django.http.headers import read_key
from celery_idempotent.django.http.options import SETTING, HttpOptions, http_options, refuse_idle
from celery_idempotent.django.http.problems import Refusal
from celery_idempotent.django.http.transactions import (
    atomic_requests,
    left_alone,
    roll_back_requests,
)
from celery_idempotent.django.http.transactions import spared as spared_by
from celery_idempotent.errors import InvalidOption

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponseBase

__all__ = ["Marks", "idempotent_view", "keyed_view", "marks_of", "require_key"]

#: A view function, a method that handles requests, or a class of views.
View = TypeVar("View", bound=Callable[..., Any])


class Marks:
    """What is known of a decorated view, for the schema of an API: its options, and whether it runs in the request."""

    def __init__(self, name: str, given: dict[str, Any], *, guards: bool) -> None:
        self.name = name
        self.guards = guards
        self._given = given
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        # What does not depend on settings is checked now, with the view.
        http_options(given)
        if "show_errors" in given:
            note_shown(given["show_errors"])
        if guards:
            namespaces.note(given)
        setting_changed.connect(self._forget)

    def _forget(self, *, setting: str = "", **_: Any) -> None:
        if setting == SETTING:
            self._guard = None

    @property
    def guard(self) -> Guard:
        """What guards the view, under the settings that hold."""
        guard = self._guard
        if guard is None:
            with self._lock:
                guard = self._guard = Guard(self.name, self, http_options(self._given))
        return guard

    @property
    def options(self) -> HttpOptions:
        """The options of the view."""
        return self.guard.options


def marks_of(view: Any) -> Marks | None:
    """Return what is known of a decorated view, ``None`` of any other."""
    found = getattr(view, "idempotency", None)
    return found if isinstance(found, Marks) else None


def idempotent_view(view: Any = None, /, **options: Any) -> Any:
    """Let a view take effect once for each ``Idempotency-Key`` of a caller; whoever asks again gets the first answer.

    ``@idempotent_view`` or ``@idempotent_view(required=False, ...)``, over a view function, a coroutine, a class-based
    view, an ``APIView`` or ``ViewSet`` of Django REST framework, or one of their methods. See
    :class:`~celery_idempotent.django.http.options.HttpOptions` for the options.

    Raises:
        InvalidOption: for an unknown option, or a bad value.
    """
    return _decorator(view, options, guards=True)


def keyed_view(view: Any = None, /, **options: Any) -> Any:
    """Check the ``Idempotency-Key`` of a view that hands it to :func:`~celery_idempotent.django.http.enqueue`.

    A missing or malformed key is refused before anything else is looked at. Used as :func:`idempotent_view`, with the
    options that concern the header and the answers of ``enqueue()``; the rest is up to the task.

    Raises:
        InvalidOption: for an option that is unknown or does nothing here, or a bad value.
    """
    return _decorator(view, options, guards=False)


def _decorator(view: Any, options: dict[str, Any], *, guards: bool) -> Any:
    refuse_idle(options, "idempotent" if guards else "keyed")

    def decorate(target: View) -> View:
        name = f"{target.__module__}.{target.__qualname__}"
        return _decorate(target, Marks(name, options, guards=guards))  # type: ignore[no-any-return]

    return decorate if view is None else decorate(view)


def _decorate(target: Any, marks: Marks) -> Any:
    if isinstance(target, type):
        return _class(target, marks)
    rest: Any = getattr(target, "cls", None)
    if _is_rest(rest):
        # A view that @api_view or as_view() made: who calls is known only inside of it.
        made = _class(type(rest.__name__, (rest,), {"__module__": rest.__module__}), marks)
        actions = getattr(target, "actions", None)
        again = made.as_view(*([actions] if actions else []), **target.initkwargs)
        return wraps(target, updated=())(again)
    return _function(target, marks)


def _is_rest(cls: Any) -> bool:
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
    spared = spared_by(dispatch)

    @wraps(dispatch)
    def checked(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        refused = _refusal(request, marks.options)
        if refused is not None:
            return refused
        # With a key, the transaction is within the claim.
        within = not marks.guards or request.idempotency_key is not None  # type: ignore[attr-defined]  # ours
        try:
            with atomic_requests(frozenset(connections) if within else spared):
                return dispatch(self, request, *args, **kwargs)
        except TOO_LARGE as error:
            return _too_large(request, marks.options, error)

    @wraps(initial)
    def begun(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        initial(self, request, *args, **kwargs)
        name = str(request.method).lower()
        handler = getattr(self, name, None)
        if handler is not None:
            keyed = request._request.idempotency_key is not None  # noqa: SLF001  Django's own request
            within = spared if keyed else frozenset(connections)
            setattr(self, name, _function(handler, marks, spared=within))

    cls.dispatch = left_alone(checked) if marks.guards else checked
    cls.initial = begun


def _function(view: Any, marks: Marks, *, spared: frozenset[str] | None = None) -> Any:
    """Wrap a function, a coroutine, or a method that takes a request first."""
    if spared is None:
        spared = spared_by(view)

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarded | HttpResponseBase | None:
        seen, request = _request_of(args)
        refused = _refusal(request, marks.options)
        if refused is not None:
            return refused
        if not marks.guards:
            return _unreceived(request, marks.options)
        if getattr(request, "idempotency_guarded", False):
            return None  # decorated twice, a view is guarded once
        key = request.idempotency_key
        # Of a method Django knows nothing: ATOMIC_REQUESTS is around it, or was switched off for its view.
        lonely = seen is not args[0] and getattr(view, "__name__", "") != "dispatch"
        call = partial(view, *args, **kwargs)
        guarded = Guarded(
            request=request,
            seen=seen,
            key=key,
            args=args[1:] if seen is args[0] else args[2:],
            kwargs=kwargs,
            run=call if key is None else lambda: _rendered(seen, call(), kwargs),
            spared=frozenset(connections) if lonely else spared,
        )
        return guarded if marks.guard.has_work(guarded) else None

    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(args, kwargs)
        if prepared is None:
            return await view(*args, **kwargs)
        if not isinstance(prepared, Guarded):
            return prepared

        async def run() -> Any:
            return await view(*args, **kwargs)

        # The protocol in the thread of this request; the view itself goes back to the event loop.
        guarded = replace(prepared, run=async_to_sync(run))
        respond = sync_to_async(marks.guard.respond, thread_sensitive=True)
        return await to_the_end(respond(guarded), name=marks.name)

    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        try:
            return await awaiting(*args, **kwargs)
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], marks.options, error)

    @wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(args[0], "view_is_async", False):  # dispatch() returns what its handler returns
            return asynchronous(*args, **kwargs)
        try:
            prepared = prepare(args, kwargs)
            if isinstance(prepared, Guarded):
                return _final(prepared, marks.guard.respond(prepared))
            return view(*args, **kwargs) if prepared is None else prepared
        except TOO_LARGE as error:
            return _too_large(_request_of(args)[1], marks.options, error)

    made: Any = wraps(view)(asynchronous) if iscoroutinefunction(view) else wrapper
    made.idempotency = marks
    return left_alone(made) if marks.guards else made


def _request_of(args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the request that a function or a method is called with, and Django's own that may be within."""
    seen = args[0] if hasattr(args[0], "META") else args[1]
    return seen, getattr(seen, "_request", seen)


def _refusal(request: Any, options: HttpOptions) -> HttpResponseBase | None:
    """Read the key into ``request.idempotency_key``, and return the answer to a request that has none or a bad one."""
    request.idempotency_key = None
    request.idempotency_options = options
    if request.method not in options.methods or options.mode == "off":
        return None
    try:
        request.idempotency_key = require_key(request, options)
    except Refusal as refusal:
        return refusal.response(options.docs_url)
    return None


def _unreceived(request: Any, options: HttpOptions) -> HttpResponseBase | None:
    """Receive the body of a request that is to be queued, and return the answer to one that cannot be."""
    if request.method not in options.methods or options.mode == "off":
        return None
    try:
        receive(request, options)
    except Refusal as refusal:
        return refusal.response(options.docs_url)
    return None


def _too_large(request: Any, options: HttpOptions, error: Exception) -> HttpResponseBase:
    """Answer a request over one of Django's own limits, for which Django has a page."""
    if request.method not in options.methods:
        raise error
    roll_back_requests()
    return too_large().response(options.docs_url)


def require_key(request: HttpRequest, options: HttpOptions) -> str | None:
    """Return the key of a request, ``None`` where it may have none.

    Raises:
        Refusal: ``idempotency_key_missing`` or ``idempotency_key_invalid``.
    """
    key = read_key(request, strict=options.strict)
    if key is None and options.required:
        raise Refusal(
            "idempotency_key_missing",
            "Send a header Idempotency-Key with a value that is new for each intention, such as a UUID, and the same "
            "when you try again.",
        )
    return key


def _rest_view(seen: Any) -> Any:
    """Return the view of Django REST framework that handles a request, ``None`` of any other kind."""
    view = (getattr(seen, "parser_context", None) or {}).get("view")
    return view if hasattr(view, "finalize_response") else None


def _rendered(seen: Any, response: Any, kwargs: dict[str, Any]) -> Any:
    """Let Django REST framework finish its response now: its bytes are what is kept."""
    view = _rest_view(seen)
    return response if view is None else view.finalize_response(seen, response, **kwargs)


def _final(guarded: Guarded, response: Any) -> Any:
    """Keep Django REST framework from finishing once more what is finished, or a replay, which has no data."""
    view = _rest_view(guarded.seen)
    if view is None or guarded.key is None or not getattr(response, "is_rendered", True):
        return response
    finalize = view.finalize_response

    def once(request: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
        return made if made is response else finalize(request, made, *args, **kwargs)

    view.finalize_response = once
    return response
