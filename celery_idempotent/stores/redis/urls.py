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

#: A task that fails can be tried again, one that hangs cannot. A URL's query may set other timeouts.
_DEFAULTS = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0, "protocol": 2}


def link_and_prefix(url: str, options: Mapping[str, Any]) -> tuple[Link, str]:
    """Return the link that ``url`` describes, not yet connected, and the prefix it names.

    ``options`` are further arguments of redis-py's connections; the URL's query wins over them.
    """
    address, _, text = url.partition("?")
    scheme = address.partition("://")[0]
    query = dict(parse_qsl(text, keep_blank_values=True))
    prefix = query.pop("prefix", "idem")
    query.pop("decode_responses", None)
    if "ssl_cert_reqs" in query:  # CERT_NONE, as Celery writes it
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    try:
        if scheme == "sentinel":
            return _sentinel(address, query, options), prefix
        if scheme.endswith("+cluster"):
            return _cluster(address, query, options), prefix
        pool = ConnectionPool(**_arguments(address, query, options))
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
    given = pool.connection_kwargs
    where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
    return Server(pool, f"Redis at {where}"), prefix


def _cluster(address: str, query: Mapping[str, str], options: Mapping[str, Any]) -> Link:
    scheme, user, hosts, path = _parts(address)
    given = _shared(_arguments(f"{scheme}://{user}{hosts[0]}{path}", query, options))
    if given.pop("db", 0):
        raise _incomplete("a database: a Cluster has only number 0")
    nodes = [ClusterNode(*_host_and_port(host, 6379)) for host in hosts]  # type: ignore[no-untyped-call]
    # Follows a Cluster's changes for about half a second; a failover takes longer, and is left to the caller.
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.02), 5)
    connect = partial(RedisCluster, startup_nodes=nodes, retry=retry, **given)
    return Cluster(connect, f"Redis Cluster at {','.join(hosts)}")


def _sentinel(address: str, query: dict[str, str], options: Mapping[str, Any]) -> Link:
    _, user, hosts, path = _parts(address)
    name, _, db = path.strip("/").partition("/")
    if not name:
        raise _incomplete("no master name")
    of_masters = dict(options)
    own = of_masters.pop("sentinel_kwargs", None) or {}
    tls = of_masters.pop("ssl", False) or query.pop("ssl", "").lower() in {"1", "true", "yes"}
    scheme = "rediss" if tls else "redis"
    names = [name for name in query if name.startswith("sentinel_")]
    of_sentinels = {name.removeprefix("sentinel_"): query.pop(name) for name in names}
    masters = _shared(_arguments(f"{scheme}://{user}localhost/{db}", query, of_masters))
    # With the timeouts and certificates of the masters, but a user and a password of their own.
    own = {k: v for k, v in masters.items() if k.startswith(("socket_", "ssl_"))} | own
    own.pop("ssl", None)
    watchers = _shared(_arguments(f"{scheme}://localhost", of_sentinels, own))
    # A Sentinel that is down is not tried again: there are others.
    watchers["retry"] = Retry(NoBackoff(), 0)
    addresses = [_host_and_port(host, 26379) for host in hosts]
    sentinels = Sentinel(addresses, sentinel_kwargs=watchers)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(name, sentinels, **masters)  # type: ignore[no-untyped-call]
    return Server(pool, f"Redis master {name} of Sentinel at {';'.join(hosts)}")


def _arguments(
    address: str, query: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what redis-py reads in a URL, as arguments of a pool."""
    url = f"{address}?{urlencode(query)}"
    given: dict[str, Any] = {**_DEFAULTS, **options, **parse_url(url)}  # type: ignore[no-untyped-call]
    pool = ConnectionPool(**given)
    # Connects to nothing, but refuses unknown options.
    pool.connection_class(**pool.connection_kwargs)
    return given


def _shared(given: dict[str, Any]) -> dict[str, Any]:
    """Return them as arguments of redis-py's other clients, which have hosts of their own."""
    kind = given.pop("connection_class", None)
    given = {name: value for name, value in given.items() if name not in ("host", "port")}
    return given | ({"ssl": True} if kind is SSLConnection else {})


def _parts(address: str) -> tuple[str, str, list[str], str]:
    """Split ``scheme://user:password@host;host/path``; user and path keep their ``@`` and ``/``."""
    scheme, _, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    found = [host for host in hosts.replace(";", ",").split(",") if host]
    if not found:
        raise _incomplete("no host")
    return scheme.partition("+")[0], user + at, found, slash + path


def _host_and_port(host: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise _incomplete("no host")
    return parts.hostname, parts.port or default_port


def _incomplete(what: str) -> InvalidOption:
    return InvalidOption(f"the idempotency store's URL has {what}")
