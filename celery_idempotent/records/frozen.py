"""``@frozen``: a dataclass of the values that each run makes a dozen of."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["frozen"]

if TYPE_CHECKING:
    from dataclasses import dataclass as frozen
else:
    from dataclasses import dataclass

    def frozen(**options: bool):
        """Return :func:`dataclasses.dataclass` with these options; only the type checker holds it to ``frozen=True``.

        Python would have each field of a frozen one assigned by a call of ``object.__setattr__``: for all the values of
        one task these took a third as long as both of its trips to Redis.
        """
        return dataclass(**{**options, "frozen": False, "unsafe_hash": True})
