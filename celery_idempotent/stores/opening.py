"""From a URL, or from an app's own Redis, to a store.

Celery's Redis result backend has read the settings ``redis_*`` and its URL: the store takes its connection parameters.
The broker's URL is rewritten to ours::

    socket:///run/redis.sock?virtual_host=1              unix:///run/redis.sock?db=1
    sentinel://s1/0;sentinel://s2, master_name="main"    sentinel://s1;s2/main/0
    redis://one;redis://two                              refused: records do not move with a failover
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores.base import Store

if TYPE_CHECKING:
    from celery import Celery

#: The schemes of Celery's own Redis result backends.
_BACKENDS = {"redis", "rediss", "redis+socket", "socket", "sentinel"}

#: Parameters of the backend's connections that the store's do not share: a pool's, those of ``redis.Redis``, and text
#: where scripts answer with bytes.
_NOT_SHARED = {"decode_responses", "hosts", "max_connections", "retry_on_timeout"}


def from_app(app: Celery) -> Store | None:
    """Open the Redis of the app's result backend, or else of its broker; ``None`` if neither is one.

    The ``global_keyprefix`` that keeps apps on one server apart starts our keys as well.
    """
    backend: object = app.conf.result_backend
    if isinstance(backend, str) and backend.partition("://")[0] in _BACKENDS:
        return _from_backend(app)
    return _from_broker(app)


def _from_backend(app: Celery) -> Store:
    """Open the Redis of Celery's own result backend, with the same parameters of connections."""
    from celery.app.defaults import DEFAULTS

    from celery_idempotent.stores.redis.store import RedisStore

    try:
        backend: Any = app.backend
        given: dict[str, Any] = dict(backend.connparams)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidOption(
            f"the app's result_backend cannot be set up ({type(error).__name__}): correct its settings, or set"
            " idempotency_store"
        ) from None
    if app.conf.redis_socket_timeout == DEFAULTS["redis_socket_timeout"]:
        # Two minutes, which nobody chose: a task must not wait for its claim that long.
        given["socket_timeout"] = None
    options = {
        name: value
        for name, value in given.items()
        if value is not None and name not in _NOT_SHARED
    }
    url = "redis://"
    if (hosts := given.get("hosts")) is not None:
        options.pop("connection_class", None)
        transport = app.conf.result_backend_transport_options or {}
        addresses = [f"{host['host']}:{host['port']}" for host in hosts]
        url = _sentinels(addresses, transport, db=options.pop("db", 0))
        options["sentinel_kwargs"] = transport.get("sentinel_kwargs")
        options["ssl"] = bool(app.conf.redis_backend_use_ssl)
    prefix = backend.task_keyprefix.decode().removesuffix(type(backend).task_keyprefix)
    return RedisStore(url, prefix=f"{prefix}idem", options=options)


def _from_broker(app: Celery) -> Store | None:
    """Open the broker if it is one Redis."""
    from celery_idempotent.stores.redis.store import RedisStore

    transport = app.conf.broker_transport_options or {}
    url, tls = _broker_url(app.conf.broker_url, transport), app.conf.broker_use_ssl
    if url is None:
        return None
    options: dict[str, object] = dict(tls) if isinstance(tls, Mapping) else {}
    if url.startswith("sentinel://"):
        options["sentinel_kwargs"] = transport.get("sentinel_kwargs")
        options["ssl"] = bool(tls)
    elif tls and url.startswith("redis://"):
        url = "rediss" + url.removeprefix("redis")
    keyprefix = transport.get("global_keyprefix")
    return RedisStore(url, prefix=f"{keyprefix}idem" if keyprefix else None, options=options)


def _broker_url(url: object, transport: Mapping[str, object]) -> str | None:
    """Return Celery's URL of a Redis in our form, ``None`` if it is something else.

    Raises:
        InvalidOption: for a list of brokers that begins with a Redis.
    """
    if isinstance(url, (list, tuple)):
        url = ";".join(url)
    if not isinstance(url, str):
        return None
    scheme, _, rest = url.partition("://")
    if scheme == "sentinel":
        return _sentinel_url(url, transport)
    if scheme not in ("redis", "rediss", "socket", "redis+socket"):
        return None
    if ";" in url:
        raise InvalidOption(
            "broker_url fails over from one server to another, and no records move with it: while the first is down"
            " no task could run. Set idempotency_store to the Redis that keeps the records"
        )
    if scheme in ("socket", "redis+socket"):
        return _unix_url(rest)
    # kombu reads its own options from the query; those of the connection itself are ours as well.
    address, _, query = url.partition("?")
    tls = [(k, v) for k, v in parse_qsl(query) if k.startswith("ssl_")]
    return (address if "://" in address else f"{scheme}://") + ("?" + urlencode(tls) if tls else "")


def _unix_url(rest: str) -> str:
    parts = urlsplit(f"unix://{rest}")
    query = dict(parse_qsl(parts.query))
    db = query.get("virtual_host", "0").strip("/") or "0"
    user = parts.netloc.rpartition("@")[0]
    return f"unix://{user}{'@' if user else ''}{parts.path}?db={db}"


def _sentinel_url(url: str, transport: Mapping[str, object]) -> str:
    """Read ``sentinel://:secret@h1/0;sentinel://h2``."""
    user, db, hosts = "", "", []
    for part in url.split(";"):
        authority, _, path = part.removeprefix("sentinel://").partition("/")
        of_part, _, host = authority.rpartition("@")
        hosts.append(host)
        user = user or of_part
        db = db or path.partition("?")[0].strip("/")
    return _sentinels(hosts, transport, db=db or "0", user=user)


def _sentinels(
    hosts: list[str], transport: Mapping[str, object], *, db: object, user: str = ""
) -> str:
    """Return the URL of the master that the transport options name."""
    master = transport.get("master_name")
    if not master:
        raise InvalidOption(
            "the app's Sentinel has no master_name in its transport options:"
            " set it there, or set idempotency_store"
        )
    return f"sentinel://{user}{'@' if user else ''}{';'.join(hosts)}/{quote(str(master))}/{db}"
