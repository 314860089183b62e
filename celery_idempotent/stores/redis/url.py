"""What a Redis URL asks for: which servers, how to reach them, and the prefix of our keys.

::

    redis://:secret@cache:6379/1?prefix=shop       one server; keys begin with "shop"
    redis+cluster://node1:7000,node2:7000          a cluster, found by any node that answers
    sentinel://s1:26379;s2:26379/mymaster/1        whichever server the Sentinels call the master now

redis-py reads the query of a URL, and makes the connections; which connection is used when is ours (:mod:`.channel`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores.redis.channel import Address, Connection, Link, Server
from celery_idempotent.stores.redis.cluster import Cluster
from celery_idempotent.stores.redis.endpoint import endpoint_of
from celery_idempotent.stores.redis.sentinel import Sentinels

DEFAULT_PREFIX = "idem"

#: A task that fails can be tried again, one that hangs cannot. A URL's query may set another one.
DEFAULT_SOCKET_TIMEOUT = 5.0
_DEFAULTS: Mapping[str, object] = {
    "socket_timeout": DEFAULT_SOCKET_TIMEOUT,
    "socket_connect_timeout": 2.0,
    "protocol": 2,
}
#: Celery writes these the long way, redis-py the short one.
_CERT_REQS = {"CERT_NONE": "none", "CERT_OPTIONAL": "optional", "CERT_REQUIRED": "required"}
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379


def link_and_prefix(url: str, options: Mapping[str, object]) -> tuple[Link, str]:
    """Return the link that ``url`` describes, not yet connected, and the prefix it names.

    ``options`` are further arguments of redis-py's connections; the URL's query wins over them.
    """
    try:
        scheme, _, rest = url.partition("://")
        rest, _, query_text = rest.partition("?")
        query = dict(parse_qsl(query_text, keep_blank_values=True))
        prefix = query.pop("prefix", DEFAULT_PREFIX)
        query.pop("decode_responses", None)
        reqs = query.get("ssl_cert_reqs")
        if reqs is not None:
            query["ssl_cert_reqs"] = _CERT_REQS.get(reqs, reqs)
        if scheme == "sentinel":
            return _sentinel(rest, query, options), prefix
        if scheme.endswith("+cluster"):
            return _cluster(scheme.removesuffix("+cluster"), rest, query, options), prefix
        return _single_server(scheme, rest, query, options), prefix
    except (TypeError, RedisError) as error:
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL asks for what redis-py does not know: {error}"
        ) from error
    except _IncompleteError as error:
        raise InvalidOption(f"the idempotency store's {scheme}:// URL has {error}") from None
    except ValueError:
        # Shows nothing of the URL: an unquoted '#' or '/' in a password makes the rest of it look like a port.
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL cannot be read: check host, port and"
            " database, and percent-encode special characters in the password"
        ) from None


class _IncompleteError(ValueError):
    """A part of the URL is missing. The text names the part, and shows nothing of the URL."""


def _single_server(
    scheme: str, rest: str, query: dict[str, str], options: Mapping[str, object]
) -> Server:
    pool = _pool(scheme, rest, query, options)
    kwargs = pool.connection_kwargs
    if kwargs.get("path"):
        where = f"Redis at {kwargs['path']}"
    else:
        where = f"Redis at {kwargs.get('host', 'localhost')}:{kwargs.get('port', _REDIS_PORT)}"
    connect = functools.partial(pool.connection_class, **kwargs)
    return Server(connect, where=where, endpoint=endpoint_of(pool))


def _cluster(scheme: str, rest: str, query: dict[str, str], options: Mapping[str, object]) -> Link:
    user, hosts, path = _authority(rest)
    seeds = [_address(host, _REDIS_PORT) for host in hosts]
    pool = _pool(scheme, f"{user}{hosts[0]}{path}", query, options)
    return Cluster(_connector(pool), seeds, where=f"Redis Cluster at {','.join(hosts)}")


def _sentinel(rest: str, query: dict[str, str], options: Mapping[str, object]) -> Server:
    user, hosts, path = _authority(rest)
    name, _, db = path.strip("/").partition("/")
    if not name:
        raise _IncompleteError("no master name")
    addresses = [_address(host, _SENTINEL_PORT) for host in hosts]
    tls = query.pop("ssl", "").lower() in {"1", "true", "yes"} or bool(options.get("ssl"))
    scheme = "rediss" if tls else "redis"
    for_sentinels = {
        key.removeprefix("sentinel_"): query.pop(key)
        for key in list(query)
        if key.startswith("sentinel_")
    }
    for_masters = {k: v for k, v in options.items() if k not in ("ssl", "sentinel_kwargs")}
    masters = _pool(scheme, f"{user}localhost/{db}", query, for_masters)
    # With the timeouts and certificates of the masters, but a user and a password of their own.
    shared = {
        k: v for k, v in masters.connection_kwargs.items() if k.startswith(("socket_", "ssl_"))
    }
    own = cast("Mapping[str, object]", options.get("sentinel_kwargs") or {})
    given = {k: v for k, v in own.items() if k != "ssl"}
    watchers = _pool(scheme, "localhost", for_sentinels, {**shared, **given})
    sentinels = Sentinels(_connector(watchers), addresses, name)
    to_master = _connector(masters)
    return Server(
        lambda: to_master(sentinels.master()),
        where=f"Redis master {name} of Sentinel at {';'.join(hosts)}",
    )


def _pool(
    scheme: str, rest: str, query: Mapping[str, str], options: Mapping[str, object]
) -> ConnectionPool:
    """Let redis-py read a URL. Of its pool only the connections' class and arguments are used."""
    url = f"{scheme}://{rest}"
    if query:
        url += "?" + urlencode(query)
    pool = ConnectionPool.from_url(url, **{**_DEFAULTS, **options})
    pool.connection_class(
        **pool.connection_kwargs
    )  # Connects to nothing, but refuses unknown options.
    return pool


def _connector(pool: ConnectionPool) -> Callable[[Address], Connection]:
    def connect(address: Address) -> Connection:
        host, port = address
        where = {"host": host, "port": port}
        connection: Connection = pool.connection_class(**{**pool.connection_kwargs, **where})
        return connection

    return connect


def _authority(rest: str) -> tuple[str, list[str], str]:
    """Split ``user:password@host;host/path``; user and path keep their ``@`` and ``/``."""
    authority, slash, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    found = [host for host in hosts.replace(";", ",").split(",") if host]
    if not found:
        raise _IncompleteError("no host")
    return user + at, found, slash + path


def _address(host: str, default_port: int) -> Address:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise _IncompleteError("no host")
    return parts.hostname, parts.port or default_port
