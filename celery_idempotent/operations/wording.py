"""Times as people read them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def iso(ms: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC."""
    if ms is None:
        return None
    return f"{(_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec='milliseconds')[:-6]}Z"


def time_in_words(ms: int) -> str:
    """Return a length of time in its two largest units."""
    seconds = ms // 1000
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def ago(ms: int, now_ms: int) -> str:
    """Return how far a time is away."""
    words = time_in_words(abs(now_ms - ms))
    return f"in {words}" if ms > now_ms else f"{words} ago"


def moment(ms: int, now_ms: int) -> str:
    """Return a time, and how far away it is."""
    at = _EPOCH + timedelta(milliseconds=ms)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({ago(ms, now_ms)})"
