"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines and the methods of views that handle requests.

Who calls is known before the claim: Django REST framework calls a handler after authentication::

    function, coroutine             key ─ body ─ claim ─ the view
    handler of Django               dispatch() ─ key ─ body ─ claim ─ the handler
    handler of REST framework       authentication, permissions, throttles ─ key ─ body ─ claim ─ the handler
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial, wraps
from typing import Any, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.signals import setting_changed
from django.db import connections
from django.http import HttpResponseBase

from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import (
    KEY_META,
    caller_scope,
    http_options,
    receive,
    request_fingerprint,
)
from celery_idempotent.django.http.responses import pack_response, response_of, returned_response
from celery_idempotent.errors import InvalidOption
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.guard import Guard, RequestRun, to_the_end
from celery_idempotent.http.options import METHODS
from celery_idempotent.http.requests import http_identity, read_key
from celery_idempotent.records import HTTP_NAMESPACE
from celery_idempotent.stores import get_store

#: A view function, or a method that handles requests.
ViewFunction = Callable[..., Any]
View = TypeVar("View", bound=ViewFunction)


# -- decorators --------------------------------------------------------------------------------------------------------


@overload
def idempotent_view(view: View, /, **options: object) -> View: ...
@overload
def idempotent_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def idempotent_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Let a view take effect once for each ``Idempotency-Key`` of a caller; a repetition gets the first answer.

    ``@idempotent_view`` or ``@idempotent_view(required=False, ...)``, over a view function, a coroutine, or a method
    that handles requests (``post`` of a view class, an action of a ``ViewSet``, a function below ``@api_view``). See
    :class:`~celery_idempotent.http.options.HttpOptions` for the options.

    Raises:
        InvalidOption: for an unknown option, a bad value, or a view class.
    """
    decorate = partial(_decorated, given=options, guards=True)
    return decorate if view is None else decorate(view)


@overload
def keyed_view(view: View, /, **options: object) -> View: ...
@overload
def keyed_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def keyed_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Check the ``Idempotency-Key`` of a view that hands it to :func:`~celery_idempotent.django.http.enqueue`.

    A missing or malformed key is refused before anything else is checked. Used as :func:`idempotent_view`, whose errors
    it raises. Of its options, ``scope``, ``required``, ``max_request_bytes`` and ``docs_url`` apply; the task has the
    rest.
    """
    decorate = partial(_decorated, given=options, guards=False)
    return decorate if view is None else decorate(view)


def _decorated(view: ViewFunction, given: dict[str, object], *, guards: bool) -> ViewFunction:
    if isinstance(view, type) or hasattr(getattr(view, "cls", None), "initialize_request"):
        raise InvalidOption(
            f"{view.__qualname__} is a class, or a view of Django REST framework, which finds its caller only inside: "
            'decorate its handler (with @method_decorator(..., name="post") on the class), or below @api_view.'
        )
    decorated = _DecoratedView(view, given, guards=guards)

    @wraps(view)
    def call(*args: Any, **kwargs: Any) -> object:
        asked = _Call(decorated, args, kwargs)
        try:
            run = partial(view, *args, **kwargs)
            return asked.answer(run) if asked.is_guarded() else run()
        except RequestRefused as refused:
            return asked.refusal(refused)

    @wraps(view)
    async def await_(*args: Any, **kwargs: Any) -> object:
        asked = _Call(decorated, args, kwargs)
        try:
            if not asked.is_guarded():
                return await view(*args, **kwargs)
            # The protocol in the thread of this request; the view itself goes back to the event loop.
            run = partial(async_to_sync(view), *args, **kwargs)
            return await to_the_end(sync_to_async(asked.answer)(run))
        except RequestRefused as refused:
            return asked.refusal(refused)

    return await_ if iscoroutinefunction(view) else call


# -- requests ----------------------------------------------------------------------------------------------------------


class _DecoratedView:
    """A view with its options, which are read again when Django's settings change (``override_settings()``)."""

    def __init__(self, view: ViewFunction, given: dict[str, object], *, guards: bool) -> None:
        self.name = f"{view.__module__}.{view.__qualname__}"
        self.guards, self._given = guards, given
        http_options(given)  # a bad option is refused with the view
        setting_changed.connect(self._forget)

    def _forget(self, **_: object) -> None:
        vars(self).pop("guard", None)

    @cached_property
    def guard(self) -> Guard:
        """What guards the view, made for its first request: the project's app is known by then."""
        options = http_options(self._given)
        pack = partial(pack_response, max_bytes=options.max_response_bytes, name=self.name)
        return Guard(self.name, self, options, partial(get_store, celery_app()), pack)


class _Call:
    """One call of a view: ``seen`` is the request that it gets, ``request`` Django's own that may be within."""

    def __init__(self, view: _DecoratedView, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = 0 if hasattr(args[0], "META") else 1  # of a method
        self.view, self.guard, self.options = view, view.guard, view.guard.options
        self.seen, self.args, self.kwargs = args[at], args[at + 1 :], kwargs
        self.request = request = getattr(self.seen, "_request", self.seen)
        request.idempotency_key, request.idempotency_options = None, self.options
        #: The view of Django REST framework that handles the request, ``None`` of any other kind.
        view_of_rest = (getattr(self.seen, "parser_context", None) or {}).get("view")
        self.rest = view_of_rest if hasattr(view_of_rest, "finalize_response") else None

    def is_guarded(self) -> bool:
        """Read the key, and the body of a request that is to be queued; is there more to do than to call the view?"""
        request, options = self.request, self.options
        if request.method not in METHODS:
            return False
        key = read_key(request.META.get(KEY_META), required=options.required)
        request.idempotency_key = key
        if not self.view.guards:
            receive(request, options)
            return False
        return key is not None or options.atomic

    def answer(self, run: Callable[[], object]) -> HttpResponseBase:
        """Answer the request, from the view or from the record."""
        key, claiming = self.request.idempotency_key, None
        if key is not None:
            receive(self.request, self.options)
            identity = http_identity(HTTP_NAMESPACE, caller_scope(self.seen, self.options), key)
            fingerprint = request_fingerprint(self.request, self.seen, self.options)
            claiming = RequestRun(self.guard, identity, fingerprint, self._refused_replay)
        if self.options.atomic:
            _refuse_open_transactions()
        found = self.guard.answer(claiming, partial(self._run, run))
        response = response_of(found) if isinstance(found, Answer) else found
        return self._finished(cast("HttpResponseBase", response))

    def _run(self, run: Callable[[], object]) -> HttpResponseBase:
        """Call the view, and finish its response: its bytes are stored."""
        if not self.options.atomic:  # else its own transaction is open by now
            _refuse_open_transactions()
        returned = run()
        if self.rest is not None:
            returned = self.rest.finalize_response(self.seen, returned, **self.kwargs)
        response = returned_response(returned, self.view.name)
        if not getattr(response, "is_rendered", True):
            response = response.render()  # type: ignore[attr-defined]  # of a template
        return self.guard.kept(response, response.status_code)

    def _refused_replay(self) -> HttpResponseBase | None:
        """Return the answer to a caller who may not have the replay, ``None`` for any other."""
        if self.options.authorize is None:
            return None
        found = self.options.authorize(self.seen, *self.args, **self.kwargs)
        if isinstance(found, HttpResponseBase):
            return found
        if found is not True:  # for example a coroutine
            raise PermissionDenied
        return None

    def refusal(self, refused: RequestRefused) -> HttpResponseBase:
        """Return the answer to a request that is not carried out."""
        return self._finished(response_of(refused.answer(self.options.docs_url)))

    def _finished(self, response: HttpResponseBase) -> HttpResponseBase:
        """Keep Django REST framework from finishing once more what is finished, or a replay, which has no data."""
        if (view := self.rest) is not None:
            finalize = view.finalize_response
            view.finalize_response = lambda request, made, *args, **kwargs: (
                made if made is response else finalize(request, made, *args, **kwargs)
            )
        return response


def _refuse_open_transactions() -> None:
    """Refuse to run inside a transaction: a record is settled after the COMMIT."""
    for connection in connections.all(initialized_only=True):
        for block in getattr(connection, "atomic_blocks", ()):
            if not getattr(block, "_from_testcase", False):
                raise ImproperlyConfigured(
                    f"An idempotent view runs inside a transaction on {connection.alias!r}: its answer would be "
                    "recorded before the COMMIT, which may fail. Open the transaction inside of the view. Under "
                    "ATOMIC_REQUESTS put @non_atomic_requests above @idempotent_view or @api_view, on a class of views "
                    'as method_decorator(non_atomic_requests, name="dispatch").'
                )
