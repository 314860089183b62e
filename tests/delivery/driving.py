"""Driving many histories at once: each says by a generator what it waits for, and one that fails stops no other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

#: What a history waits for is there after so many seconds, or never: hundreds share two cores.
PATIENCE = 180

Steps = Generator[Callable[[], Any], None, None]


class Play(Protocol):
    """A history that can be driven."""

    #: What went wrong in it.
    error: BaseException | None

    def steps(self) -> Steps: ...
    def end(self) -> None:
        """Let go of what still waits."""

    def story(self) -> str:
        """Return all that is known of it, for a failure."""


class Stage:
    """Histories of which so many play at a time; ``between`` is called again and again meanwhile."""

    def __init__(
        self,
        plays: Iterable[Play],
        *,
        at_once: int,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._waiting = deque(plays)
        self._playing: list[_Playing] = []
        self._at_once = at_once
        self._between = between

    def goes_on(self) -> bool:
        while self._waiting and len(self._playing) < self._at_once:
            self._playing.append(_Playing(self._waiting.popleft()))
        self._playing = [each for each in self._playing if each.goes_on()]
        self._between()
        return bool(self._waiting or self._playing)


def drive(*stages: Stage) -> None:
    """Let all stages play at once; what goes wrong in one history stays with it."""
    going = list(stages)
    while going:
        going = [stage for stage in going if stage.goes_on()]
        time.sleep(0.02)


class _Playing:
    """What a history waits for, and until when."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._steps = play.steps()
        self._condition: Callable[[], Any] = lambda: True
        self._deadline = 0.0

    def goes_on(self) -> bool:
        try:
            if self._condition():
                self._condition = next(self._steps)
                self._deadline = time.monotonic() + PATIENCE
            elif time.monotonic() > self._deadline:
                self._steps.throw(AssertionError(f"waited in vain: {self._play.story()}"))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001  the test of this history raises it
            self._play.error = error
        else:
            return True
        self._play.end()
        return False
