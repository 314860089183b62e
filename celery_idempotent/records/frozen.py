"""``@frozen`` and ``@sealed``: dataclasses that are cheap to define, for the values that this package hands around."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["frozen", "sealed"]

if TYPE_CHECKING:
    from dataclasses import dataclass as frozen
    from dataclasses import dataclass as sealed
else:
    from dataclasses import dataclass, fields
    from operator import attrgetter

    def frozen(**options: bool):
        """Return what makes a dataclass with these options; only the type checker holds it to ``frozen=True``.

        Python would have each field of a frozen one assigned by a call of ``object.__setattr__``: for all the values of
        one task these took a third as long as both of its trips to Redis.
        """
        return sealed(**{**options, "frozen": False})

    def sealed(**options: bool):
        """Return what makes a dataclass with these options: one that Python holds to ``frozen=True``.

        Each method that a dataclass writes for itself is compiled from a text of its own, and for all of ours that took
        a quarter of the time to import this package. So it writes only those that have to be fast.
        """

        def decorate(cls: type) -> type:
            made = dataclass(**{**options, "eq": False, "repr": False})(cls)
            _compare_and_show(made)
            return made

        return decorate

    def _compare_and_show(cls: type) -> None:
        """Give a class what its dataclass is without: equality and a hash by its content, and a text that shows it."""
        content = attrgetter(*[each.name for each in fields(cls) if each.compare])
        shown = [each.name for each in fields(cls) if each.repr]

        def equals(self: object, other: object) -> bool:
            if other.__class__ is not self.__class__:
                return NotImplemented
            return content(self) == content(other)

        def hashed(self: object) -> int:
            return hash(content(self))

        def described(self: object) -> str:
            parts = ", ".join([f"{name}={getattr(self, name)!r}" for name in shown])
            return f"{self.__class__.__qualname__}({parts})"

        cls.__eq__, cls.__hash__, cls.__repr__ = equals, hashed, described
