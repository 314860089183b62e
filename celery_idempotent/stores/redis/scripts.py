"""The Lua scripts, one a verb, and commands as they go over the wire."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

from celery_idempotent.records import State
from celery_idempotent.stores.values import LETTERS

#: What redis-py reads for a command: bytes, a number, ``None``, a list of these, or a ``ResponseError``. Which of them
#: the caller knows by the command, and mypy does not.
Reply: TypeAlias = Any

#: The verbs that are a script.
VERBS = (
    "checkpoint",
    "claim",
    "due",
    "forget",
    "interrupt",
    "mark_delivered",
    "note_sweep",
    "prune",
    "release",
    "renew",
    "requeue",
    "reserve",
    "rights",
    "settle",
    "sweep",
    "write_result",
)

#: The scripts of the cache before another store.
CACHE_VERBS = ("cache_bury", "cache_fill", "cache_lift", "cache_look", "cache_mark")

#: What goes before a word of n bytes, ready made: formatting it took longer than all the rest of packing a command.
_SIZES = tuple([b"\r\n$%d\r\n" % size for size in range(512)])

#: A line of a script in whose place another file goes. A function that a common case does not need is included after
#: that case: a script defines its functions anew each time that it runs.
_INCLUDE = re.compile(r"^ *--include (\w+)\.lua$", re.MULTILINE)

#: What each verb's script begins with: patterns of the records that are unfinished, and of those that have ended.
_PATTERNS = "local LIVE, ENDED = '^[{}]', '^[{}]'\n".format(
    *(
        "".join(LETTERS[state] for state in State if state.settled is settled)
        for settled in (False, True)
    )
).encode()


class Script(NamedTuple):
    """A script that the server may know by its digest."""

    source: bytes
    digest: bytes

    def call(self, bucket: int, keys: Sequence[bytes], *args: bytes) -> Command:
        """Return the command that runs this script on keys of one bucket."""
        words = (b"EVALSHA", self.digest, b"%d" % len(keys), *keys, *args)
        return Command(bucket, words, self.source)


class Command(NamedTuple):
    """One command, and the bucket of its keys, which decides the Cluster node that gets it."""

    bucket: int
    words: tuple[bytes, ...]
    source: bytes | None = None

    def packed(self) -> bytes:
        """Return the command in Redis' protocol, for a fraction of what redis-py's packer takes."""
        words = self.words
        try:
            parts = [_SIZES[len(word)] + word for word in words]
        except IndexError:  # a long one
            parts = [b"\r\n$%d\r\n%b" % (len(word), word) for word in words]
        return b"*%d%b\r\n" % (len(words), b"".join(parts))

    def with_source(self) -> Command:
        """Return the same call with the script itself, for a server that does not know it."""
        if self.source is None:
            return self
        return self._replace(words=(b"EVAL", self.source, *self.words[2:]))


def plain(bucket: int, *words: bytes) -> Command:
    """Return a command that is no script."""
    return Command(bucket, words)


def pairs(reply: Reply) -> list[tuple[Reply, Reply]]:
    """Return pairs: RESP2 answers with a flat list, RESP3 with a map or a list of pairs."""
    if isinstance(reply, dict):
        return list(reply.items())
    if reply and isinstance(reply[0], list):
        return [(first, second) for first, second in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


@functools.cache
def script(verb: str) -> Script:
    """Return the script of a verb."""
    source = _read_source(verb).encode()
    if verb in VERBS:
        source = _PATTERNS + source
    # The digest is Redis' name for the script, not a matter of security.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())


def _read_source(name: str) -> str:
    path = files("celery_idempotent.stores.redis") / "lua" / f"{name}.lua"
    return _INCLUDE.sub(lambda found: _read_source(found[1]), path.read_text(encoding="utf-8"))
