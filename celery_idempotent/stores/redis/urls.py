"""What a Redis URL asks for: which servers, how to reach them, and the prefix of our keys.

::

    redis://:secret@cache:6379/1?prefix=shop       one server; keys begin with "shop"; rediss:// and unix:// likewise
    redis+cluster://node1:7000,node2:7000          a Cluster, found by any node that answers
    sentinel://s1:26379;s2:26379/mymaster/1        whichever server the Sentinels call the master now

redis-py reads the rest of a URL, its query included.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.backoff import ExponentialBackoff, NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import ConnectionPool, SSLConnection, parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores.redis.servers import Cluster, Link, Server

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


def link_and_prefix(url: str, options: Mapping[str, Any]) -> tuple[Link, str]:
    """Return the link that ``url`` describes, not yet connected, and the prefix it names.

    ``options`` are further arguments of redis-py's connections; the URL's query wins over them.
    """
    address, _, query_text = url.partition("?")
    scheme = address.partition("://")[0]
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    prefix = query.pop("prefix", DEFAULT_PREFIX)
    query.pop("decode_responses", None)
    if reqs := query.get("ssl_cert_reqs"):
        query["ssl_cert_reqs"] = _CERT_REQS.get(reqs, reqs)
    make = {"sentinel": _sentinel, "redis+cluster": _cluster, "rediss+cluster": _cluster}
    try:
        return make.get(scheme, _single)(address, query, options), prefix
    except (TypeError, RedisError) as error:
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL asks for what redis-py does not know: {error}"
        ) from error
    except ValueError:
        # Shows nothing of the URL: an unquoted '#' or '/' in a password makes the rest of it look like a port.
        raise InvalidOption(
            f"the idempotency store's {scheme}:// URL cannot be read: check host, port and"
            " database, and percent-encode special characters in the password"
        ) from None


def _single(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    pool = _pool(address, query, options)
    given = pool.connection_kwargs
    where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
    return Server(pool, f"Redis at {where}")


def _cluster(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    user, hosts, path = _authority(address)
    scheme = address.partition("+")[0]
    kwargs = _arguments(f"{scheme}://{user}{hosts[0]}{path}", query, options)
    if kwargs.pop("db", 0):
        raise _incomplete("a database: a Cluster has only number 0")
    kwargs["startup_nodes"] = [ClusterNode(*_address(host, 6379)) for host in hosts]  # type: ignore[no-untyped-call]
    # Follows a Cluster's changes for about half a second; a failover takes longer, and is left to the caller.
    kwargs["retry"] = Retry(ExponentialBackoff(cap=0.2, base=0.02), 5)
    return Cluster(partial(RedisCluster, **kwargs), f"Redis Cluster at {','.join(hosts)}")


def _sentinel(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    user, hosts, path = _authority(address)
    name, _, db = path.strip("/").partition("/")
    if not name:
        raise _incomplete("no master name")
    tls = query.pop("ssl", "").lower() in {"1", "true", "yes"} or bool(options.get("ssl"))
    scheme = "rediss" if tls else "redis"
    of_masters = {k: v for k, v in options.items() if k not in ("ssl", "sentinel_kwargs")}
    names = [name for name in query if name.startswith("sentinel_")]
    of_sentinels = {name.removeprefix("sentinel_"): query.pop(name) for name in names}
    masters = _arguments(f"{scheme}://{user}localhost/{db}", query, of_masters)
    # With the timeouts and certificates of the masters, but a user and a password of their own.
    shared = {k: v for k, v in masters.items() if k.startswith(("socket_", "ssl_"))}
    own = {k: v for k, v in (options.get("sentinel_kwargs") or {}).items() if k != "ssl"}
    watchers = _arguments(f"{scheme}://localhost", of_sentinels, {**shared, **own})
    # A Sentinel that is down is not tried again: there are others.
    watchers["retry"] = Retry(NoBackoff(), 0)
    addresses = [_address(host, 26379) for host in hosts]
    sentinels = Sentinel(addresses, sentinel_kwargs=watchers)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(name, sentinels, **masters)  # type: ignore[no-untyped-call]
    return Server(pool, f"Redis master {name} of Sentinel at {';'.join(hosts)}")


def _pool(address: str, query: Mapping[str, str], options: Mapping[str, Any]) -> ConnectionPool:
    """Let redis-py read a URL. Of its pool only the connections' class and arguments are used."""
    pool = ConnectionPool.from_url(f"{address}?{urlencode(query)}", **{**_DEFAULTS, **options})
    # Connects to nothing, but refuses unknown options.
    pool.connection_class(**pool.connection_kwargs)
    return pool


def _arguments(
    address: str, query: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what redis-py reads in a URL as arguments of its other clients, which have hosts of their own."""
    _pool(address, query, options)
    given = {**_DEFAULTS, **options, **parse_url(f"{address}?{urlencode(query)}")}  # type: ignore[no-untyped-call]
    kind = given.pop("connection_class", None)
    given = {name: value for name, value in given.items() if name not in ("host", "port")}
    return given | ({"ssl": True} if kind is SSLConnection else {})


def _authority(address: str) -> tuple[str, list[str], str]:
    """Split ``scheme://user:password@host;host/path``; user and path keep their ``@`` and ``/``."""
    authority, slash, path = address.partition("://")[2].partition("/")
    user, at, hosts = authority.rpartition("@")
    found = [host for host in hosts.replace(";", ",").split(",") if host]
    if not found:
        raise _incomplete("no host")
    return user + at, found, slash + path


def _address(host: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise _incomplete("no host")
    return parts.hostname, parts.port or default_port


def _incomplete(what: str) -> InvalidOption:
    return InvalidOption(f"the idempotency store's URL has {what}")
