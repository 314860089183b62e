"""``@idempotent_view`` and ``@keyed_view``: for functions, coroutines and the methods of views that handle requests.

Who calls is known before the claim: a function has its user from Django's middleware, and Django REST framework calls a
handler after authentication, permissions and throttles::

    function, coroutine             key ─ body ─ claim ─ the view, in its transactions
    handler of Django               dispatch() ─ key ─ body ─ claim ─ the handler
    handler of REST framework       authentication, permissions, throttles ─ key ─ body ─ claim ─ the handler
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial, wraps
from typing import Any, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.core.signals import setting_changed
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase

from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import (
    KEY_META,
    TOO_LARGE,
    caller_scope,
    http_options,
    receive,
    request_fingerprint,
)
from celery_idempotent.django.http.responses import (
    awaited,
    pack_response,
    response_of,
    returned_response,
)
from celery_idempotent.errors import InvalidOption
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.guard import Guard, RequestRun, to_the_end
from celery_idempotent.http.keys import http_identity, read_key
from celery_idempotent.http.options import HTTP_NAMESPACE, METHODS, HttpOptions
from celery_idempotent.protocol.options import fields_by_option
from celery_idempotent.stores import get_store

#: A view function, or a method that handles requests.
ViewFunction = Callable[..., Any]
View = TypeVar("View", bound=ViewFunction)

#: The options that ``@keyed_view`` takes: those of the header. The task has the others.
_KEYED = frozenset(("scope", "required", "max_request_bytes", "docs_url"))

#: The namespaces of the views with ``@idempotent_view``; none in a project that guards none.
_namespaces: set[str] = set()


def view_namespaces() -> list[str]:
    """Return the namespace of guarded views; none in a project that guards none."""
    return list(_namespaces)


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

    A missing or malformed key is refused before anything else is looked at. Used as :func:`idempotent_view`, with the
    options that concern the header and the answers of ``enqueue()``; the rest is up to the task.

    Raises:
        InvalidOption: for an option that is unknown or does nothing here, or a bad value.
    """
    if unused := sorted((options.keys() & fields_by_option(HttpOptions).keys()) - _KEYED):
        raise InvalidOption(
            f"{', '.join(unused)} does nothing for keyed_view: it is for idempotent_view, or an option of the task."
        )
    decorate = partial(_decorated, given=options, guards=False)
    return decorate if view is None else decorate(view)


def _decorated(view: ViewFunction, given: dict[str, object], *, guards: bool) -> ViewFunction:
    _refuse_class(view, "idempotent_view" if guards else "keyed_view")
    decorated = _DecoratedView(view, given, guards=guards)

    @wraps(view)
    def call(*args: Any, **kwargs: Any) -> object:
        asked = _Asked(decorated, args, kwargs)
        try:
            run = partial(view, *args, **kwargs)
            return asked.answer(run) if asked.is_guarded() else run()
        except (RequestRefused, *TOO_LARGE) as error:
            return asked.refusal(error)

    @wraps(view)
    async def await_(*args: Any, **kwargs: Any) -> object:
        asked = _Asked(decorated, args, kwargs)
        try:
            if not asked.is_guarded():
                return await view(*args, **kwargs)
            # The protocol in the thread of this request; the view itself goes back to the event loop.
            run = partial(async_to_sync(view), *args, **kwargs)
            return await to_the_end(sync_to_async(asked.answer)(run), name=decorated.name)
        except (RequestRefused, *TOO_LARGE) as error:
            return asked.refusal(error)

    made: ViewFunction = await_ if iscoroutinefunction(view) else call
    if guards:
        _namespaces.add(HTTP_NAMESPACE)
        # The guard itself opens the transactions of ATOMIC_REQUESTS, so that a record comes after the COMMIT.
        vars(made)["_non_atomic_requests"] = set(connections)  # what non_atomic_requests sets
    return made


def _refuse_class(view: ViewFunction, decorator: str) -> None:
    """Refuse a class of views, and what Django REST framework makes of one: the caller is known only inside of it.

    Raises:
        InvalidOption: with what to decorate instead.
    """
    name = view.__qualname__
    if isinstance(view, type):
        raise InvalidOption(
            f"{name} is a class, and @{decorator} is for functions and handlers: decorate its post(), or the class "
            f'with @method_decorator({decorator}, name="post").'
        )
    # dispatch() of method_decorator() is known with its instance, at a request.
    bound = getattr(view, "func", None) if name.endswith(".dispatch") else None
    if hasattr(getattr(view, "cls", getattr(bound, "__self__", None)), "initialize_request"):
        raise InvalidOption(
            f"{name} is a view of Django REST framework, which knows its caller only inside: put @{decorator} below "
            "@api_view, or on the handler or action of the class."
        )


def object_permissions(request: HttpRequest, *_: object, **__: object) -> bool:
    """Ask what a view of Django REST framework about one object asks: its ``get_object()``.

    For ``@idempotent_view(authorize=object_permissions)``: a caller who no longer gets the object from
    ``get_queryset()``, or is refused by a ``has_object_permission()``, gets the framework's 404 or 403. An action of a
    router that is about no object (``create``) has nothing to ask.

    Raises:
        InvalidOption: for a view that has no ``get_object()``.
    """
    view: Any = getattr(request, "parser_context", {}).get("view")
    if getattr(view, "detail", None) is not False:
        if not hasattr(view, "get_object"):
            raise InvalidOption(
                "authorize=object_permissions is for views of Django REST framework with a get_object(); "
                "give a function of your own: authorize(request, *args, **kwargs) -> bool"
            )
        view.get_object()
    return True


# -- requests ----------------------------------------------------------------------------------------------------------


class _DecoratedView:
    """A view with its options, which are read again when Django's settings change (``override_settings()``)."""

    def __init__(self, view: ViewFunction, given: dict[str, object], *, guards: bool) -> None:
        self.name = f"{view.__module__}.{view.__qualname__}"
        self.guards, self._given = guards, given
        #: The databases on which ``ATOMIC_REQUESTS`` does not hold for this view.
        self.non_atomic = frozenset(getattr(view, "_non_atomic_requests", ()))
        http_options(given)  # a bad option is refused with the view
        setting_changed.connect(self._forget)

    def _forget(self, **_: object) -> None:
        vars(self).pop("guard", None)

    @cached_property
    def guard(self) -> Guard:
        """What guards the view, under the settings that hold."""
        options = http_options(self._given)
        pack = partial(pack_response, options=options, name=self.name)
        return Guard(self.name, self, options, lambda: get_store(celery_app()), pack)

    def transactions(self) -> list[str]:
        """Return the databases on which ``ATOMIC_REQUESTS`` makes a transaction of a request."""
        return [
            alias
            for alias, database in connections.settings.items()
            if database["ATOMIC_REQUESTS"] and alias not in self.non_atomic
        ]


class _Asked:
    """One call of a view: ``seen`` is the request that it gets, ``request`` Django's own that may be within."""

    def __init__(self, view: _DecoratedView, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = 0 if hasattr(args[0], "META") else 1  # of a method
        self.view, self.guard, self.options = view, view.guard, view.guard.options
        self.seen, self.args, self.kwargs = args[at], args[at + 1 :], kwargs
        self.request = getattr(self.seen, "_request", self.seen)

    def is_guarded(self) -> bool:
        """Read the key; is there anything to do about this request but to call its view?

        Raises:
            RequestRefused: if the key is missing or malformed; of a request that is to be queued, for its body too.
        """
        request, options = self.request, self.options
        request.idempotency_key, request.idempotency_options = None, options
        if request.method in METHODS:
            request.idempotency_key = read_key(
                request.META.get(KEY_META), required=options.required
            )
            if not self.view.guards:
                receive(request, options)
        if not self.view.guards or getattr(request, "idempotency_guarded", False):
            return False  # decorated twice, a view is guarded once
        return bool(request.idempotency_key or self._is_atomic or self.view.transactions())

    @property
    def _is_atomic(self) -> bool:
        return self.options.atomic and self.request.method in METHODS

    @property
    def _rest(self) -> Any:
        """The view of Django REST framework that handles a request with a key, ``None`` of any other kind."""
        if self.request.idempotency_key is None:
            return None
        view = (getattr(self.seen, "parser_context", None) or {}).get("view")
        return view if hasattr(view, "finalize_response") else None

    def answer(self, run: Callable[[], object]) -> HttpResponseBase:
        """Answer the request, from the view or from the record.

        Raises:
            Exception: what the view raises, or the reading of the body; the key is free then.
        """
        self.request.idempotency_guarded = True
        try:
            found = self._answer(run)
        finally:
            # Some middleware hands the same request to its view once more.
            self.request.idempotency_guarded = False
        return self._finished(found)

    def _answer(self, run: Callable[[], object]) -> HttpResponseBase:
        key, claiming = self.request.idempotency_key, None
        if key is not None:
            receive(self.request, self.options)
            identity = http_identity(HTTP_NAMESPACE, caller_scope(self.seen, self.options), key)
            fingerprint = request_fingerprint(self.request, self.seen, self.options)
            claiming = RequestRun(self.guard, identity, fingerprint, self._refused_replay)
        elif not self._is_atomic:
            with self._transactions():
                return returned_response(run(), self.view.name)
        _refuse_open_transactions()
        found = self.guard.answer(claiming, partial(self._run, run))
        return response_of(found) if isinstance(found, Answer) else cast("HttpResponseBase", found)

    def _run(self, run: Callable[[], object]) -> HttpResponseBase:
        """Call the view inside the transactions that ``ATOMIC_REQUESTS`` asks for.

        They end before the key is settled: a record that says COMPLETED, and then a COMMIT that fails, would be a lie.
        """
        with self._transactions():
            returned = run()
            if self._rest is not None:
                # Finished at once: the bytes of the response are stored.
                returned = self._rest.finalize_response(self.seen, returned, **self.kwargs)
            response = returned_response(returned, self.view.name)
            if not getattr(response, "is_rendered", True):
                response = response.render()  # type: ignore[attr-defined]  # of a template
            return self.guard.kept(response, response.status_code)

    @contextmanager
    def _transactions(self) -> Iterator[None]:
        with ExitStack() as stack:
            for alias in self.view.transactions():
                stack.enter_context(transaction.atomic(using=alias))
            yield

    def _refused_replay(self) -> HttpResponseBase | None:
        """Return the answer to a caller who may not have the replay, ``None`` for any other.

        Raises:
            PermissionDenied: if ``authorize`` says neither yes nor what to answer.
        """
        if self.options.authorize is None:
            return None
        found = self.options.authorize(self.seen, *self.args, **self.kwargs)
        found = awaited(found, f"authorize of {self.view.name}")
        if not isinstance(found, HttpResponseBase) and not found:
            raise PermissionDenied
        return found if isinstance(found, HttpResponseBase) else None

    def refusal(self, error: Exception) -> HttpResponseBase:
        """Return the answer to a request that is not carried out, or that is over a limit of Django's own.

        Raises:
            Exception: that one of a safe request, for which Django has a page.
        """
        if not isinstance(error, RequestRefused):
            if self.request.method not in METHODS:
                raise error
            for own in connections.all(initialized_only=True):
                if own.settings_dict["ATOMIC_REQUESTS"] and own.in_atomic_block:
                    own.set_rollback(True)
            error = RequestRefused("request_too_large", "It is larger than this service reads.")
        return self._finished(response_of(error.answer(self.options.docs_url)))

    def _finished(self, response: HttpResponseBase) -> HttpResponseBase:
        """Keep Django REST framework from finishing once more what is finished, or a replay, which has no data."""
        view = self._rest
        if view is not None and getattr(response, "is_rendered", True):
            finalize = view.finalize_response
            view.finalize_response = lambda request, made, *args, **kwargs: (
                made if made is response else finalize(request, made, *args, **kwargs)
            )
        return response


def _refuse_open_transactions() -> None:
    """Refuse to run inside a transaction: a record is settled after the COMMIT.

    Raises:
        ImproperlyConfigured: if there is a transaction around the guard.
    """
    for connection in connections.all(initialized_only=True):
        for block in getattr(connection, "atomic_blocks", ()):
            if not getattr(block, "_from_testcase", False):
                raise ImproperlyConfigured(
                    f"An idempotent view runs inside a transaction on {connection.alias!r}: its answer would be "
                    "recorded before the COMMIT, which may fail. Put the transaction inside of the view. A handler's "
                    "class, or what @api_view made, needs @non_atomic_requests under ATOMIC_REQUESTS, for a class by "
                    'method_decorator(non_atomic_requests, name="dispatch"): the guard opens that transaction inside.'
                )
