"""The guard of one view: claim the key of a request, then run the view, or answer from the record.

::

    claim ─┬─ Claimed ────▶ the view ─┬─ settle with its response
           │                          └─ not one to repeat (a 503), or an exception: release
           ├─ Settled ────▶ may this caller have it? then the stored response
           ├─ Held ───────▶ 409, Retry-After
           ├─ Mismatched ─▶ 422
           └─ no answer ──▶ 503
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar

from celery_idempotent.errors import FingerprintMismatch, ResultUnavailable
from celery_idempotent.http.answers import (
    UNSURE,
    Parts,
    RequestRefused,
    ResponseCodec,
    read_response,
)
from celery_idempotent.http.options import HttpOptions, RequestFunction
from celery_idempotent.http.status import failure_of
from celery_idempotent.protocol import atomic
from celery_idempotent.protocol.run import Run, execute
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.signals import worker_name
from celery_idempotent.stores import Store

T = TypeVar("T")


class _NotToKeepError(Exception):
    """The view ran, and its answer is not one to repeat: the key is given back."""


class Guard:
    """Guards one view; ``name`` is for people, ``sender`` what signals come from."""

    def __init__(
        self,
        name: str,
        sender: object,
        options: HttpOptions,
        open_store: Callable[[], Store],
        parts: Callable[[Any], Parts],
    ) -> None:
        self.name, self.sender, self.open_store = name, sender, open_store
        self.options, self.policy = options, options.policy
        self.codec = ResponseCodec(name, options.max_response_bytes, parts)


class RequestRun(Run):
    """One request to a guarded view."""

    guard: Guard
    #: What the view returned.
    response: Any
    began = False
    #: A server of WSGI may end a worker that answers late. One of ASGI does not, and waits for requests when it stops.
    settle_seconds = 3.0

    # -- what a framework adds -----------------------------------------------------------------------------------------

    def respond(self) -> Stored:
        """Run the view, and return its response, which is :meth:`kept`."""
        raise NotImplementedError

    def refusal(self, authorize: RequestFunction) -> object | None:
        """Return the answer to a caller to whom ``authorize`` refuses the stored response, ``None`` to any other."""
        raise NotImplementedError

    # -- the answer ----------------------------------------------------------------------------------------------------

    def answer(self, identity: Identity | None, fingerprint: bytes | None) -> Any:
        """Return the response of the view, or an :class:`.Answer`; an atomic view without a key has no ``identity``.

        Raises:
            RequestRefused: if the key is another request's or in use, or the store cannot be asked.
            Exception: what the view raises; the key is free then.
        """
        guard = self.guard
        self.name, self.policy, self.open_store = guard.name, guard.policy, guard.open_store  # type: ignore[method-assign]
        try:
            if identity is None:
                store = atomic.transactional(self.open_store(), self.name)
                with store.unguarded_transaction():
                    self.respond()
                return self.response
            self.identity, self.fingerprint = identity, fingerprint
            self.codec, self.sender = guard.codec, guard.sender
            self.task_id = str(uuid.uuid4())
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
        except _NotToKeepError as answered:
            return answered.args[0]

    def kept(self, response: object, status: int, *, is_kept: bool = True) -> Stored:
        """Pack the response of a view if it is one to repeat; any other leaves the view as an exception."""
        if status >= 500 or status in self.guard.options.unstored or not is_kept:
            raise _NotToKeepError(response)
        self.response = response
        return self.guard.codec.pack(response)

    def _respond_once(self) -> Stored:
        """Run the view, once: after that its files are read, and its user may have changed."""
        if self.began:
            raise RequestRefused(
                "rolled_back",
                "The database rolled it back: a deadlock or a serialization failure. Send the same request with"
                " the same key again.",
            )
        self.began = True
        return self.respond()

    def replay(self, record: Record, age_ms: int) -> object:  # noqa: ARG002
        """Repeat the stored response to a caller who may have it."""
        authorize = self.guard.options.authorize
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


async def to_the_end(work: Awaitable[T]) -> T:
    """Await ``work``, which a cancellation does not reach; it is passed on when the work is done.

    A server cancels a coroutine when its client hangs up. Between an effect and its record that would release the key,
    and the next attempt would charge once more.
    """
    contexts: list[Context] = []

    async def whole() -> T:
        try:
            return await work
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
