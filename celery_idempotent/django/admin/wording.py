"""The messages of the admin about outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from django.contrib.messages import constants

from celery_idempotent.celery.operations import Outcome

#: The level and the text of each; ``{done}`` stands for the operation, ``{identity}`` for its key.
ENDINGS: Mapping[Outcome, tuple[int, str]] = MappingProxyType(
    {
        Outcome.DONE: (constants.SUCCESS, "{done}: {identity}."),
        Outcome.UNSENT: (
            constants.WARNING,
            "{identity} is queued, but its message could not be published: the next sweep after its deadline does.",
        ),
        Outcome.CHANGED: (
            constants.ERROR,
            "Nothing was done: {identity} has changed since its page was shown. This is how it is now.",
        ),
        Outcome.LIVE: (
            constants.ERROR,
            "Nothing was done: a live owner took {identity} meanwhile.",
        ),
    }
)
