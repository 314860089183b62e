"""What the pages say about each operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from celery_idempotent.celery.operations import Operation

__all__ = ["WORDINGS", "Wording"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words for one operation: on its button, before it, after it, and where it means nothing."""

    button: str
    effect: str
    done: str
    refusal: str


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
            refusal="only an interrupted or a processing record whose message is stored can be requeued.",
        ),
        "fail": Wording(
            button="Fail",
            effect="The key is settled as failed: until its retention ends nothing runs for it, and whoever asks"
            " gets the error FailedByOperator.",
            done="Failed",
            refusal="only an unfinished record can be failed.",
        ),
        "forget": Wording(
            button="Forget",
            effect="The record is deleted with all that it knows: the next call of this key runs, even if the"
            " operation took effect before.",
            done="Forgotten",
            refusal="there is no record.",
        ),
    }
)
