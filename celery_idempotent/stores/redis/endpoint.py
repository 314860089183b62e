"""Whether two clients of Redis talk to the same database, and as the same user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection

#: With one of these arguments a connection may lead elsewhere, log in otherwise, or write other bytes.
_UNKNOWN = ("credential_provider", "redis_connect_func", "encoder_class")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One database of one server, and who asks. Equal ones are the same; others may be the same, too."""

    kind: type
    address: tuple[object, ...]
    db: int
    #: User name, password, and the files of a client's certificate.
    login: tuple[object, ...] = field(repr=False)


def endpoint_of(pool: ConnectionPool) -> Endpoint | None:
    """Return where the connections of this pool lead, ``None`` if that cannot be said."""
    kind, given = pool.connection_class, pool.connection_kwargs
    if kind not in (Connection, SSLConnection, UnixDomainSocketConnection):
        return None
    if any(given.get(name) for name in _UNKNOWN) or not _writes_utf8(given):
        return None
    if kind is UnixDomainSocketConnection:
        address: tuple[object, ...] = (given.get("path"),)
    else:
        address = (given.get("host") or "localhost", int(given.get("port") or 6379))
    login = ("username", "password", "ssl_certfile", "ssl_keyfile")
    return Endpoint(
        kind,
        address,
        int(given.get("db") or 0),
        tuple(given.get(name) or None for name in login),
    )


def _writes_utf8(given: Mapping[str, object]) -> bool:
    return str(given.get("encoding") or "utf-8").lower() in {"utf-8", "utf8"}
