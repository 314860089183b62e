"""The front door: one request, from its key to its answer, whatever the framework.

::

    key ─ body ─ caller ─ claim ─┬─ Claimed ────▶ the view ─┬─ settle with its response
                                 │                          └─ not one to repeat (a 503), or an exception: release
                                 ├─ Settled ────▶ may this caller have it? then the stored response
                                 ├─ Held ───────▶ 409, Retry-After
                                 ├─ Mismatched ─▶ 422
                                 └─ no answer ──▶ 503

Adapters read a request and write a response: views of Django, and the middleware for ASGI and WSGI.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Final, NoReturn

from celery.utils.imports import symbol_by_name

from celery_idempotent.errors import FingerprintMismatch, InvalidKey, ResultUnavailable
from celery_idempotent.http import requests
from celery_idempotent.http.answers import (
    UNSURE,
    Parts,
    RequestRefused,
    ResponseCodec,
    read_response,
)
from celery_idempotent.http.requests import Request, read_header
from celery_idempotent.http.status import failure_of
from celery_idempotent.keys.fingerprints import NoFormError, form
from celery_idempotent.keys.rules import canonical
from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.options import (
    Policy,
    accept_if,
    duration,
    flag,
    option,
    optional,
    whole_number,
)
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import HTTP_NAMESPACE, Record, State, Stored, random_id
from celery_idempotent.signals import worker_name
from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

# -- options -----------------------------------------------------------------------------------------------------------

#: The methods that need a key; the others have no effect to repeat.
METHODS: Final = frozenset(("POST", "PUT", "PATCH", "DELETE"))

#: Takes the request of the framework.
RequestFunction = Callable[..., object]

_string = accept_if(lambda value: isinstance(value, str), "must be a string")


def _callable(value: object) -> RequestFunction:
    try:
        found: object = symbol_by_name(value) if isinstance(value, str) else value
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if not callable(found) or iscoroutinefunction(found):
        raise ValueError(
            "must be a function of the request (not a coroutine function), or its dotted path"
        )
    return found


def _key(value: object) -> str | RequestFunction:
    if not isinstance(value, str):
        return _callable(value)
    if not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError("must be the name of a header, or a function of the request")
    return value


def sequence(
    accepts: Callable[[Any], bool], message: str, *, at_least: int = 1
) -> Callable[[object], tuple[Any, ...]]:
    """Return a reader of a sequence of values that ``accepts(each)``."""

    def read(value: Any) -> tuple[Any, ...]:
        is_one = isinstance(value, str) or not isinstance(value, Iterable)
        found: tuple[Any, ...] = (None,) if is_one else (*value,)
        if len(found) < at_least or not all(map(accepts, found)):
            raise ValueError(f"must be a sequence of {message}")
        return found

    return read


def _is_status(value: object) -> bool:
    return isinstance(value, int) and 100 <= value < 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The options of ``@idempotent_view`` and of the setting ``IDEMPOTENCY_HTTP``."""

    key: str | RequestFunction = option("Idempotency-Key", _key)  # type: ignore[arg-type]
    scope: RequestFunction | None = option(None, optional(_callable))
    required: bool = option(True, flag)
    authorize: RequestFunction | None = option(None, optional(_callable))
    fingerprint: RequestFunction | None = option(None, optional(_callable))
    lease_ms: int = option(30_000, duration(at_least_ms=100))
    retention_ms: int = option(24 * 3_600_000, duration())
    wait_ms: int = option(0, duration())
    unstored: tuple[int, ...] = option(
        (400, 401, 403, 405, 406, 408, 411, 413, 415, 425, 429),
        sequence(_is_status, "statuses below 500; those from 500 are never stored", at_least=0),
    )
    max_request_bytes: int = option(10 * 1024 * 1024, whole_number)
    max_response_bytes: int = option(1024 * 1024, whole_number)
    docs_url: str | None = option(None, optional(_string))
    atomic: bool = option(False, flag)

    @property
    def policy(self) -> Policy:
        """The policy of the runs that guard the view."""
        return Policy(
            lease_ms=self.lease_ms,
            retention_ms=self.retention_ms,
            wait_ms=self.wait_ms,
            atomic=self.atomic,
            on_conflict="wait" if self.wait_ms else "raise",
            max_result_bytes=self.max_response_bytes,
        )


# -- the exchange ------------------------------------------------------------------------------------------------------


class ResponseNotStored(Exception):
    """The view ran, and its response is not stored: the key is released. Log and counts have this name."""


class Guard:
    """Guards one view or application; ``name`` is for errors, ``sender`` what signals come from."""

    def __init__(
        self,
        name: str,
        sender: object,
        options: HttpOptions,
        open_store: Callable[[], Store],
        namespace: str = HTTP_NAMESPACE,
        *,
        only_keys: bool = False,
    ) -> None:
        self.name, self.sender, self.open_store = name, sender, open_store
        self.options, self.policy, self.namespace = options, options.policy, namespace
        #: The view hands its key to a task.
        self.only_keys = only_keys
        #: The header that the key is in, ``None`` if a function finds it.
        self.key_header = options.key if isinstance(options.key, str) else None
        self.codec = ResponseCodec(name, options.max_response_bytes)


class Exchange(Run):
    """A request to a guarded view or application, and the response to it."""

    #: What has the headers: the scope of ASGI, or the environ of WSGI and of Django.
    environ: Request
    #: The key as it was found.
    raw_key: object = None
    #: What the view returned.
    response: Any
    #: Has the view begun to run?
    began = False
    #: A server of WSGI may end a worker that answers late. One of ASGI does not, and waits for requests when it stops.
    settle_seconds = 3.0
    #: What a framework raises for a request over one of its own limits.
    over_limits: tuple[type[Exception], ...] = ()

    # -- what an adapter adds ------------------------------------------------------------------------------------------

    #: Returns what the functions among the options get.
    given: Callable[[], tuple[Any, ...]]
    #: Receives the body, whole and within its limit.
    receive: Callable[[], None]
    #: Returns whose key it is, ``None`` of an unknown caller.
    caller: Callable[[], object]
    #: Returns method, path and the fields of the query; the form of the body.
    target: Callable[[], tuple[str, str, Mapping[str, Sequence[str]] | None]]
    body_form: Callable[[], str]
    #: Runs the view, and returns its response, which is :meth:`kept`.
    respond: Callable[[], Stored]
    #: Returns the response to a request that has no key and needs none, or that a task has the key of.
    run_unguarded: Callable[[], Any]
    #: Raises if a transaction is open that an atomic run would be part of.
    refuse_transactions: Callable[[], None]
    #: Returns the answer to a caller to whom ``authorize`` refuses the stored response, ``None`` to any other.
    refusal: Callable[[RequestFunction], object | None]

    def __init__(self, guard: Guard) -> None:
        self.guard, self.options = guard, guard.options
        self.name, self.sender, self.codec = guard.name, guard.sender, guard.codec
        self.policy = guard.policy

    def open_store(self) -> Store:
        """Return the store of the records."""
        return self.guard.open_store()

    # -- from the key to the answer ------------------------------------------------------------------------------------

    def serve(self) -> Any:
        """Return the response of the view, or an answer in its place."""
        try:
            self.take_key()
            if self.raw_key is None or self.guard.only_keys:
                return self.run_unguarded()
            return self.answer()
        except RequestRefused as refused:
            return refused.answer(self.options.docs_url)
        except self.over_limits:
            if self.began:
                raise
            why = "It is larger than this service accepts."
            return RequestRefused("request_too_large", why).answer(self.options.docs_url)

    def take_key(self) -> None:
        """Read the key, and receive the body: one that a function finds may be in it."""
        if self.read_key():
            self.receive()
            if self.guard.key_header is None:
                self.find_key()

    def read_key(self) -> bool:
        """Read the key from its header, before the body is received; ``False``: there is none, and none is needed."""
        where = self.guard.key_header
        if where is None:
            return True
        value = read_header(self.environ, where, "\n")  # which no key has: two are none
        self.raw_key = requests.read_key(value, required=self.options.required, name=where)
        return self.raw_key is not None

    def find_key(self) -> None:
        """Have a function of the project find the key.

        The sender may have written anything: where the function does not find its way, there is no key.
        """
        assert callable(self.options.key), "else it is a header"
        why = "There is no key in the place where this service expects it."
        try:
            self.raw_key = self.options.key(*self.given())
            if self.raw_key is not None:
                canonical(self.raw_key, task=self.name)
        except (LookupError, TypeError, ValueError, AttributeError, InvalidKey) as error:
            line = "idempotency: key=… of %s finds no key in a request: %s"
            logger.warning(line, self.name, type(error).__name__)
            raise RequestRefused("idempotency_key_invalid", why) from None
        if self.raw_key is None and self.options.required:
            raise RequestRefused("idempotency_key_missing", why)

    def answer(self) -> Any:
        """Return the response of the view, or an :class:`.Answer`. Without a key an atomic view has its transaction.

        An exception of the view frees the key.
        """
        if self.options.atomic:
            self.refuse_transactions()
        try:
            if self.raw_key is None:
                store = atomic.transactional(self.open_store(), self.name)
                with store.unguarded_transaction():
                    self.respond()
                return self.response
            self.identity = requests.http_identity(
                self.guard.namespace, self.caller(), self.raw_key
            )
            self.name = self.identity.namespace  # by which records are listed
            self.fingerprint = self.fingerprint_of_request()
            self.task_id = random_id()
            self.worker = worker_name(os.getpid())
            if self.policy.atomic:
                self.in_transaction = atomic.run_body
            found = execute(self, self._respond_once)
            return self.response if isinstance(found, Stored) else found
        except FingerprintMismatch:
            raise RequestRefused(
                "idempotency_key_reused",
                "It was sent before with another method, route or body. A key identifies one operation: use a new one.",
            ) from None
        except ResponseNotStored as answered:
            return answered.args[0]

    def fingerprint_of_request(self) -> bytes:
        """Return what tells this request from another one with its key."""
        own = self.options.fingerprint
        try:
            body = f"own {form(own(*self.given()))}" if own else self.body_form()
            return requests.request_fingerprint(*self.target(), body)
        except NoFormError as refused:
            raise TypeError(f"The fingerprint of a request cannot be used: {refused}.") from None

    def kept(self, response: object, parts: Parts) -> Stored:
        """Pack the response of a view if it is one to repeat; any other leaves the view as an exception."""
        if parts[0] >= 500 or parts[0] in self.options.unstored:
            raise ResponseNotStored(response)
        self.response = response
        return self.guard.codec.pack(parts)

    def _respond_once(self) -> Stored:
        """Run the view, once: after that its files are read, and its user may have changed."""
        if self.began:
            raise RequestRefused(
                "rolled_back",
                "The database rolled it back: a deadlock, a serialization failure or an ended session. Send the same"
                " request with the same key again.",
            )
        self.began = True
        return self.respond()

    def replay(self, record: Record, age_ms: int) -> object:  # noqa: ARG002
        """Repeat the stored response to a caller who may have it."""
        authorize = self.options.authorize
        refused = None if authorize is None else self.refusal(authorize)
        if refused is not None:
            return refused
        if record.state is State.FAILED:
            failure = failure_of(record, None)
            raise RequestRefused(failure.code, failure.detail)
        if record.value is None:
            raise RequestRefused("result_not_kept", "The response could not be kept.")
        try:
            return read_response(record.value)
        except ResultUnavailable as unavailable:
            raise RequestRefused("result_not_kept", str(unavailable)) from None

    def conflict(self, record: Record, left_ms: int) -> NoReturn:  # noqa: ARG002
        """Refuse a request whose key another one holds."""
        raise RequestRefused(
            "request_in_progress",
            "The first request with this key has not been answered yet. Ask again later.",
        )

    def store_failed(self, error: Exception, *, begun: bool = False) -> NoReturn:  # noqa: ARG002
        """Refuse a request that cannot be guarded now."""
        raise RequestRefused("store_unavailable", UNSURE) from error
