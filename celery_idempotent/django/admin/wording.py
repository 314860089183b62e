"""What the pages say about each operation, and about its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from django.contrib.messages import constants

from celery_idempotent.celery.operations import Operation, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words for one operation: on its button, before it, after it."""

    button: str
    effect: str
    done: str


WORDINGS: Mapping[Operation, Wording] = MappingProxyType(
    {
        "release": Wording(
            button="Release",
            effect="The claim ends now: the record is deleted (one with steps stays, interrupted), and the next"
            " delivery or call of this key runs.",
            done="Released",
        ),
        "requeue": Wording(
            button="Requeue",
            effect="The message that the record keeps is published again, under the same task id.",
            done="Requeued",
        ),
        "complete": Wording(
            button="Complete",
            effect="Use this if the task took effect and its result was not recorded. The key is settled as completed"
            " with the value that you give: nothing runs for it, and each call gets that value, as if a run returned"
            " it. Check the outside system first.",
            done="Completed",
        ),
        "fail": Wording(
            button="Fail",
            effect="The key is settled as failed: until its retention ends nothing runs for it, and each call"
            " gets the error FailedByOperator.",
            done="Failed",
        ),
        "forget": Wording(
            button="Forget",
            effect="The record is deleted with all that it knows: the next call of this key runs, even if the"
            " operation took effect before.",
            done="Forgotten",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The message about an outcome; ``{done}`` stands for the operation, ``{identity}`` for its key."""

    level: int
    message: str


ENDINGS: Mapping[Outcome, Ending] = MappingProxyType(
    {
        Outcome.DONE: Ending(level=constants.SUCCESS, message="{done}: {identity}."),
        Outcome.UNSENT: Ending(
            level=constants.WARNING,
            message="{identity} is queued, but its message could not be published: the next sweep after its"
            " deadline tries again. The log says why.",
        ),
        Outcome.CHANGED: Ending(
            level=constants.ERROR,
            message="Nothing was done: {identity} has changed since its page was shown. This is how it is now.",
        ),
        Outcome.LIVE: Ending(
            level=constants.ERROR,
            message="Nothing was done: a live owner took {identity} meanwhile.",
        ),
    }
)
