"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines and the methods of views that handle requests.

Who calls is known before the claim: Django REST framework calls a handler after authentication::

    function, coroutine             key ─ body ─ claim ─ the view
    handler of Django               dispatch() ─ key ─ body ─ claim ─ the handler
    handler of REST framework       authentication, permissions, throttles ─ key ─ body ─ claim ─ the handler
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import cache, partial, wraps
from inspect import isawaitable
from typing import Any, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.signals import setting_changed
from django.db import connections
from django.http import HttpResponseBase

from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import DjangoExchange, http_options
from celery_idempotent.django.http.responses import parts_of, refuse_returned, response_of
from celery_idempotent.errors import InvalidOption
from celery_idempotent.http.answers import Answer
from celery_idempotent.http.guard import METHODS, Guard, RequestFunction
from celery_idempotent.records import Stored
from celery_idempotent.stores import get_store

#: A view function, or a method that handles requests.
ViewFunction = Callable[..., Any]
View = TypeVar("View", bound=ViewFunction)
T = TypeVar("T")


# -- decorators --------------------------------------------------------------------------------------------------------


@overload
def idempotent_view(view: View, /, **options: object) -> View: ...
@overload
def idempotent_view(view: None = None, /, **options: object) -> Callable[[View], View]: ...
def idempotent_view(view: ViewFunction | None = None, /, **options: object) -> object:
    """Let a view take effect once for each ``Idempotency-Key`` of a caller; a repetition gets the first answer.

    ``@idempotent_view`` or ``@idempotent_view(required=False, ...)``, over a view function, a coroutine, or a method
    that handles requests (``post`` of a view class, an action of a ``ViewSet``, a function below ``@api_view``). See
    :class:`~celery_idempotent.http.guard.HttpOptions` for the options.

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
    it raises. Of its options, ``key``, ``scope``, ``required``, ``max_request_bytes`` and ``docs_url`` apply; the task
    has the rest.
    """
    decorate = partial(_decorated, given=options, guards=False)
    return decorate if view is None else decorate(view)


def _decorated(view: ViewFunction, given: dict[str, object], *, guards: bool) -> ViewFunction:
    if isinstance(view, type) or hasattr(getattr(view, "cls", None), "initialize_request"):
        raise InvalidOption(
            f"{view.__qualname__} is a class, or a view of Django REST framework, which finds its caller only inside: "
            'decorate its handler (with @method_decorator(..., name="post") on the class), or below @api_view.'
        )
    http_options(given)  # a bad option is refused with the view

    @cache
    def guard() -> Guard:  # made for the first request: the project's app is known by then
        name = f"{view.__module__}.{view.__qualname__}"
        options, opener = http_options(given), partial(get_store, celery_app())
        return Guard(name, view, options, opener, only_keys=not guards)

    # With other settings (override_settings()) the options are read again.
    setting_changed.connect(lambda **_: guard.cache_clear(), weak=False)

    @wraps(view)
    def call(*args: Any, **kwargs: Any) -> object:
        asked = _Call(guard(), view, args, kwargs)
        return asked.serve() if asked.request.method in METHODS else view(*args, **kwargs)

    @wraps(view)
    async def await_(*args: Any, **kwargs: Any) -> object:
        asked = _Call(guard(), view, args, kwargs)
        if asked.request.method not in METHODS:
            return await view(*args, **kwargs)
        if guards:
            # The protocol in the thread of this request; the view itself goes back to the event loop.
            asked.view = async_to_sync(view)
            return await to_the_end(asked.serve)
        found: Any = asked.serve()
        return await found if isawaitable(found) else found

    made: Any = await_ if iscoroutinefunction(view) else call
    made.refuses_transactions = guards  # for the check
    return made  # type: ignore[no-any-return]


# -- requests ----------------------------------------------------------------------------------------------------------


def refuse_open_transactions() -> None:
    """Refuse to run inside a transaction: a record is settled after the COMMIT."""
    for alias in connections:  # to ask which ones are initialized takes as long again
        for block in getattr(connections[alias], "atomic_blocks", ()):
            if not getattr(block, "_from_testcase", False):
                raise ImproperlyConfigured(
                    f"An idempotent view runs inside a transaction on {alias!r}: its answer would be "
                    "recorded before the COMMIT, which may fail. Open the transaction inside of the view. Under "
                    "ATOMIC_REQUESTS put @non_atomic_requests above @idempotent_view or @api_view, on a class of views "
                    'as method_decorator(non_atomic_requests, name="dispatch").'
                )


class _Call(DjangoExchange):
    """One call of a view."""

    #: The view of Django REST framework that handles the request, ``None`` of any other kind.
    rest: Any = None
    refuse_transactions = staticmethod(refuse_open_transactions)

    def __init__(self, guard: Guard, view: ViewFunction, args: Any, kwargs: Any) -> None:
        super().__init__(guard, args[0] if hasattr(args[0], "META") else args[1])  # of a method
        self.view, self.args, self.kwargs = view, args, kwargs
        request: Any = self.request
        request.idempotency_key, request.idempotency_options = None, self.options
        if request is not self.seen:
            view_of_rest = (getattr(self.seen, "parser_context", None) or {}).get("view")
            self.rest = view_of_rest if hasattr(view_of_rest, "finalize_response") else None

    def serve(self) -> Any:
        """Answer the request, and keep Django REST framework from finishing once more what is finished.

        A replay has no data to finish. What a view returned that is not guarded is for the framework.
        """
        found = super().serve()
        response = response_of(found) if isinstance(found, Answer) else found
        if self.rest is not None:
            finalize = self.rest.finalize_response
            self.rest.finalize_response = lambda request, made, *args, **kwargs: (
                made if made is response else finalize(request, made, *args, **kwargs)
            )
        return response

    def run_unguarded(self) -> Any:
        """Call the view, in a transaction if it is atomic; Django REST framework finishes its response."""
        if self.options.atomic and not self.guard.only_keys:
            return self.answer()
        self.rest, self.began = None, True
        self.request.idempotency_key = self.raw_key  # type: ignore[attr-defined]
        return self.view(*self.args, **self.kwargs)

    def respond(self) -> Stored:
        """Call the view, and finish its response: its bytes are stored."""
        if not self.options.atomic:  # else its own transaction is open by now
            refuse_open_transactions()
        self.request.idempotency_key = self.raw_key  # type: ignore[attr-defined]
        returned = self.view(*self.args, **self.kwargs)
        if self.rest is not None:
            returned = self.rest.finalize_response(self.seen, returned, **self.kwargs)
        if not isinstance(returned, HttpResponseBase):
            refuse_returned(returned, self.guard.name)
        if not getattr(returned, "is_rendered", True):
            returned = returned.render()  # type: ignore[attr-defined]  # of a template
        return self.kept(returned, parts_of(returned))

    def refusal(self, authorize: RequestFunction) -> HttpResponseBase | None:
        """Ask about the request and the URL's arguments."""
        found = authorize(*self.args[self.args.index(self.seen) :], **self.kwargs)
        if isinstance(found, HttpResponseBase):
            return found
        if found is not True:  # for example a coroutine
            raise PermissionDenied
        return None


async def to_the_end(work: Callable[[], T]) -> T:
    """Have ``work`` done in the thread of the request; a cancellation is passed on when that is done.

    Django cancels a coroutine when its client hangs up. Between an effect and its record that would release the key,
    and the next attempt would charge once more. As it closes the thread of a request with the request, nobody leaves
    before the work is done.
    """
    contexts: list[Context] = []

    async def whole() -> T:
        try:
            return await sync_to_async(work)()
        finally:
            contexts.append(copy_context())

    task, cancelled = asyncio.ensure_future(whole()), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # noqa: PERF203  it may come more than once
            cancelled = error
    # A task has a context of its own; what the view set in it, as a language, is there for the middleware.
    here = copy_context()
    for variable, value in (item for context in contexts for item in context.items()):
        if variable not in here or here[variable] is not value:
            variable.set(value)
    if cancelled is not None:
        raise cancelled  # asyncio logs the exception of a task that nobody asks for it
    return task.result()
