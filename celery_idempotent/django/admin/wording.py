"""What the pages say about each operation, and about what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from django.contrib.messages import constants

from celery_idempotent.celery.operations import Operation, Outcome

#: What is, or was, to become of a record.
LineVerdict = Literal[
    "do", "live", "left", "done", "unsent", "changed", "refused", "failed", "untried"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words for one operation: on its button, before it, after it, and where it means nothing.

    ``step_effect``: before it is done to one step, where it can be.
    """

    button: str
    effect: str
    done: str
    refusal: str
    step_effect: str = ""


WORDINGS: Mapping[Operation, Wording] = MappingProxyType(
    {
        "release": Wording(
            button="Release",
            effect="The claim ends now: the record is deleted (one with steps stays, interrupted), and the next"
            " delivery or call of this key runs.",
            done="Released",
            refusal="only a queued or a processing record can be released.",
        ),
        "requeue": Wording(
            button="Requeue",
            effect="The message that the record keeps is published again, under the same task id.",
            done="Requeued",
            refusal="only an interrupted or a processing record whose message is stored"
            ' (idempotency_on_stale="requeue") can be requeued. Calling the task again has the same effect.',
        ),
        "complete": Wording(
            button="Complete",
            effect="Use this if the task took effect and its result was not recorded. The key is settled as completed"
            " with the value that you give: nothing runs for it, and each call gets that value, as if a run returned"
            " it. Check the outside system first.",
            done="Completed",
            refusal="only a record that is not completed, of a task of this app, can be completed; of the steps"
            " those of an unfinished one.",
            step_effect="The record keeps this result of the step: the next run takes it, and does not do that step.",
        ),
        "fail": Wording(
            button="Fail",
            effect="The key is settled as failed: until its retention ends nothing runs for it, and each call"
            " gets the error FailedByOperator.",
            done="Failed",
            refusal="only an unfinished record can be failed.",
        ),
        "forget": Wording(
            button="Forget",
            effect="The record is deleted with all that it knows: the next call of this key runs, even if the"
            " operation took effect before.",
            done="Forgotten",
            refusal="there is no record, or no such step.",
            step_effect="The result of this step is taken away: the next run does the step again, even if it took"
            " effect before.",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What came of an operation: the verdict and text of its line in a summary, and the message about it alone.

    ``{done}`` stands for the operation, ``{identity}`` for its key.
    """

    verdict: LineVerdict
    line: str
    level: int
    message: str


ENDINGS: Mapping[Outcome, Ending] = MappingProxyType(
    {
        Outcome.DONE: Ending(
            verdict="done",
            line="{done}.",
            level=constants.SUCCESS,
            message="{done}: {identity}.",
        ),
        Outcome.UNSENT: Ending(
            verdict="unsent",
            line="Queued, and not published yet: the next sweep after its deadline tries again.",
            level=constants.WARNING,
            message="{identity} is queued, but its message could not be published: the next sweep after its"
            " deadline tries again. The log says why.",
        ),
        Outcome.CHANGED: Ending(
            verdict="changed",
            line="Left alone: it has changed since it was shown.",
            level=constants.ERROR,
            message="Nothing was done: {identity} has changed since its page was shown. This is how it is now.",
        ),
        Outcome.LIVE: Ending(
            verdict="refused",
            line="Left alone: a live owner took it meanwhile.",
            level=constants.ERROR,
            message="Nothing was done: a live owner took {identity} meanwhile.",
        ),
    }
)
