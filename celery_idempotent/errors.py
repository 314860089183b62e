"""The errors of the library; the first line of a docstring is the default message.

Each error survives Celery's result backend: it pickles, and its JSON form calls the class with its ``args``. Messages
name task, key and scope, never arguments or results.
"""

from __future__ import annotations

import reprlib


class IdempotencyError(Exception):
    """An idempotent task could not be handled."""

    #: The attributes that ``details`` become.
    _names: tuple[str, ...] = ()

    def __init__(self, message: str | None = None, *details: object) -> None:
        message = (type(self).__doc__ or "").split("\n", 1)[0] if message is None else message
        super().__init__(message, *details)
        vars(self).update(zip(self._names, details, strict=False))

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidOption(IdempotencyError):
    """An idempotency option is unknown or has a value that is not allowed."""


def bad_option(
    option: str, where: str, value: object, problem: str, remedy: str = ""
) -> InvalidOption:
    """Return the error of an option's value: whose it is, the value, what is allowed, and what to do."""
    remedy = remedy or "Correct it, or leave it out for the default."
    return InvalidOption(f"{option} of {where} is {reprlib.repr(value)}, and {problem}. {remedy}")


class InvalidKey(IdempotencyError):
    """An idempotency key is 1 to 255 printable characters of a str, int or UUID, or of a tuple of these."""


class KeyMissing(InvalidKey):
    """An argument that the task's idempotency key is read from is missing or None."""


class FingerprintMismatch(IdempotencyError):
    """The idempotency key was already used with other arguments."""


class InProgress(IdempotencyError):
    """Another worker holds the idempotency key.

    ``task_id`` is the holder's task id; in ``expires_in`` seconds its lease runs out, unless it is renewed.
    """

    _names = ("task_id", "expires_in")
    task_id: str | None = None
    expires_in: float | None = None


class DuplicateCall(IdempotencyError):
    """A call with this key was made before.

    ``task_id`` is the first call's task id, ``state`` that of its record.
    """

    _names = ("task_id", "state")
    task_id: str | None = None
    state: str | None = None


class LeaseLost(IdempotencyError):
    """The claim is no longer ours: a newer claim of the key exists, or the record was forgotten."""


class TooManyCrashes(IdempotencyError):
    """The task crashed its worker too often and is not run again."""

    _names = ("crashes",)
    crashes: int | None = None


class ProcessingTimedOut(IdempotencyError):
    """The run never came back before its lease ran out."""


class FailedByOperator(IdempotencyError):
    """An operator settled this idempotency key as failed: it is not run again before its retention ends."""


class ResultUnavailable(IdempotencyError):
    """The task is finished, but its result was not kept in the record and is gone from the result backend."""


class StoreUnavailable(IdempotencyError):
    """The idempotency store did not answer; trying again may help."""


class StoreMisconfigured(IdempotencyError):
    """The idempotency store cannot be used as it is set up."""


#: The errors of a store's verbs.
STORE_ERRORS = (StoreUnavailable, StoreMisconfigured)
