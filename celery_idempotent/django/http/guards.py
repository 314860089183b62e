"""Guarding one view: claim the key, run the view, store its answer, repeat it to each repetition.

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

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase

from celery_idempotent.django.applications import app_of, named_app
from celery_idempotent.django.http.bodies import receive, request_fingerprint
from celery_idempotent.django.http.callers import caller_scope
from celery_idempotent.django.http.messages import (
    awaited,
    pack_response,
    problem,
    read_response,
    refusal,
    response_of,
)
from celery_idempotent.django.http.options import HTTP_NAMESPACE, METHODS, HttpOptions
from celery_idempotent.django.http.transactions import (
    atomic_aliases,
    atomic_requests,
    refuse_open_transactions,
)
from celery_idempotent.errors import (
    FingerprintMismatch,
    IdempotencyError,
    InvalidOption,
    ResultUnavailable,
)
from celery_idempotent.events import Reporter, worker_name
from celery_idempotent.http.describing import failure_of
from celery_idempotent.http.keys import http_identity
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import Identity, Record, Stored
from celery_idempotent.serializers import NotStored, Serializer
from celery_idempotent.stores import Store, get_store


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

    def dump_error(self, error: BaseException) -> Stored | None:
        """Store what a caller may know."""
        parts = {"exc_type": type(error).__name__, "exc_message": str(error)}
        stored = self._json.dump(parts, max_bytes=None)
        return None if isinstance(stored, NotStored) else stored

    def dump_step(self, name: str, value: object) -> Stored:
        """Serialize the result of a step."""
        stored = self._json.dump(value, max_bytes=self._options.max_response_bytes)
        if isinstance(stored, NotStored):
            raise IdempotencyError(
                f"The result of step {name!r} of {self._name} cannot be recorded: {stored.reason}."
            )
        return stored

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
        self.keep_ms, self.settled_keep_ms = self.policy.keep_ms, self.policy.settled_keep_ms
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
