"""A result backend that can be asked again: after a failure to finish a chord, nothing of that chord is deleted.

Celery's backends end a chord as failed, and delete its parts, as soon as publishing its body or reading its parts
raises anything: an outage of one second costs the chord. Here an outage is raised instead, and nothing is deleted::

    Celery   the last part ─ publish the body ─ ✗ ── the body is FAILURE, parts deleted
    here     the last part ─ publish the body ─ ✗ ── Undelivered ····· the message comes back: the last part ─ publish …
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from celery.canvas import maybe_signature
from kombu.exceptions import OperationalError, SerializationError, SerializerNotInstalled

from celery_idempotent import backoff
from celery_idempotent.celery.typed import Sig
from celery_idempotent.errors import IdempotencyError, StoreUnavailable

if TYPE_CHECKING:
    from celery.app.task import Context
    from celery.backends.base import Backend

    from celery_idempotent.celery.typed import AnyBackend, AnyRequest

    Base = Backend
else:
    Base = object

logger = logging.getLogger(__name__)

#: These come from a signature or a value: it would be the same the next time.
_PERMANENT = (SerializationError, SerializerNotInstalled, IdempotencyError)
#: So do these, unless it is a broker's or server's client that raises them: a connection that breaks in the middle of
#: something has them stumble over what is no longer there.
_AMBIGUOUS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
_CLIENTS = ("kombu.transport.", "kombu.connection", "amqp.", "redis.")

#: Where a part cannot be returned twice, the publishing of a body is tried again for so long, in seconds.
_BODY_RETRY_SECONDS = 30.0


#: Give the right to publish a chord's body back, if this process still has it.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Undelivered(BaseException):
    """Something of a chord could not be sent yet.

    No ``Exception``: to Celery's chord code every one of those is the end of the chord.
    """

    def __init__(self, trouble: BaseException | None) -> None:
        super().__init__()
        self.trouble = trouble


def is_permanent(error: BaseException | None) -> bool:
    """Will this error come again however often the same is sent?

    An ``OSError`` may be a ``ValueError`` as well: TLS says so of a certificate.
    """
    if error is None or isinstance(error, (OSError, StoreUnavailable)):
        return False
    if isinstance(error, _PERMANENT):
        return True
    return isinstance(error, _AMBIGUOUS) and not any(
        module.startswith(_CLIENTS) for module in _modules(error)
    )


def _modules(error: BaseException) -> list[str]:
    """Return where an exception went through, where it was raised last."""
    modules, frames = [], error.__traceback__
    while frames is not None:
        modules.append(str(frames.tb_frame.f_globals.get("__name__")))
        frames = frames.tb_next
    return modules


def retryable(backend: Backend) -> RetryableBackend:
    """Return a view of this backend that raises :class:`Undelivered`; for one delivery."""
    kind: AnyBackend = type(backend)
    view = object.__new__(_retryable_kind(kind))
    view.__dict__ = backend.__dict__  # the same: what connects when it is first used does so once
    view.whole, view.trouble, view.claim = backend, None, None
    return view


class RetryableBackend(Base):
    """What such a view does otherwise than the backend; all else is Celery's own code."""

    __slots__ = ("claim", "trouble", "whole")

    app: Any
    whole: AnyBackend
    trouble: Undelivered | None
    #: The key and the token of the right to publish a body (Celery >= 5.7).
    claim: tuple[str, str] | None

    def prepared(self, request: Context) -> Context:
        """Return the request with a body of its chord that is published by us."""
        if not request.chord:
            return request
        prepared: AnyRequest = copy.copy(request)
        body: Any = maybe_signature(prepared.chord, app=self.app, clone=True)
        body.delay = partial(self._publish, body)
        prepared.chord = body
        return cast("Context", prepared)

    def _publish(self, body: Sig, result: object) -> object:
        failures, give_up = 0, time.monotonic() + _BODY_RETRY_SECONDS
        while True:
            try:
                return type(body).delay(body, result)
            except Exception as error:  # noqa: PERF203  each try fails for a reason of its own
                if is_permanent(error):
                    raise
                if _is_redis(self.whole):
                    self._give_up(error)
                logger.warning(
                    "idempotency: the body of a chord is not published yet: %s",
                    type(error).__name__,
                )
                failures += 1
                if not backoff.pause(failures, until=give_up, longest=1.0):
                    raise

    def _give_up(self, error: BaseException | None) -> NoReturn:
        self.trouble = Undelivered(error)
        if self.claim is not None:
            with suppress(Exception):  # or it is over in some seconds
                self.whole.client.eval(_RELEASE, 1, *self.claim)
        raise self.trouble

    @property
    def client(self) -> object:
        """The way to Redis, closed from the first trouble on: what Celery deletes in a ``finally`` has to stay."""
        return _Client(self) if _is_redis(self.whole) else self.whole.client

    @property
    def _chord_part_return_script(self) -> object:
        return self._part_returned

    def _part_returned(self, **options: Any) -> object:
        """Return a part (Celery >= 5.7).

        A chord that is complete, and claimed by another process, may have lost its publisher::

            worker A   the last part ─ claims the chord ─ ✗ SIGKILL
            worker B                            the same part ─ not its claim ─ comes back until the claim is over
        """
        parts, more, size, claimed = answer = self.whole._chord_part_return_script(**options)  # noqa: SLF001
        if size and not claimed and parts == int(size) + int(more or 0):
            self._give_up(None)
        if claimed:
            self.claim = options["keys"][5], options["args"][7]
        return answer

    def chord_error_from_stack(self, callback: object, exc: Exception | None = None) -> Exception:
        """End a chord as failed, unless it was the way to a server that failed, and no member."""
        error = sys.exc_info()[1]
        if self._is_outage(error):
            self._give_up(error)
        return super().chord_error_from_stack(callback, exc)

    def _call_task_errbacks(self, request: object, exc: object, traceback: object) -> None:
        try:
            super()._call_task_errbacks(request, exc, traceback)  # type: ignore[misc]
        except Exception as error:
            if is_permanent(error):
                raise
            self._give_up(error)

    def _is_outage(self, error: BaseException | None) -> bool:
        known = getattr(self.whole, "connection_errors", ())
        if error is None or not isinstance(error, (OperationalError, OSError, *known)):
            return False
        # Joining raises a member's own exception again, which may be of any type.
        if self.app.conf.task_remote_tracebacks:
            return False
        return not "".join(_modules(error)[-1:]).startswith(("celery.result", "vine."))


class _Client:
    """A Redis client for as long as nothing went wrong."""

    def __init__(self, view: RetryableBackend) -> None:
        self._view = view

    def __getattr__(self, name: str) -> object:
        if self._view.trouble is not None:
            raise self._view.trouble
        return getattr(self._view.whole.client, name)


def _is_redis(backend: object) -> bool:
    """Is it Celery's Redis backend, whose module cannot be imported without redis-py?"""
    return any(each.__module__ == "celery.backends.redis" for each in type(backend).__mro__)


@cache
def _retryable_kind(kind: type) -> type[RetryableBackend]:
    return type(f"Retryable{kind.__name__}", (RetryableBackend, kind), {})
