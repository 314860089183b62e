"""What lists of records and the counters by the hour share, in every store."""

from __future__ import annotations

HOUR_MS = 3_600_000


def write_cursor(kind: str, *place: int) -> str:
    """Return where a list goes on, as text: the kind of list, and numbers that mean something to that kind alone."""
    return ":".join([kind, *map(str, place)])


def read_cursor(cursor: str, kind: str, count: int) -> tuple[int, ...]:
    """Return the numbers of a cursor, as many zeros for the start of the list.

    Raises:
        ValueError: for a cursor of another kind of list, as after a change of the filter in the middle of a list.
    """
    if not cursor:
        return (0,) * count
    word, *numbers = cursor.split(":")
    if word != kind or len(numbers) != count or not all(map(str.isdecimal, numbers)):
        raise ValueError("this cursor belongs to another list")
    return tuple(map(int, numbers))
