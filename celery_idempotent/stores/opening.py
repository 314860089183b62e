"""Which store an app uses: a URL or its settings become a store, one for each app.

::

    idempotency_store       a URL, or a store                                                 first
    result_backend          if it is a Redis                                                  else
    broker_url              if it is a Redis                                                  else
    memory                  if all runs are in this process: eager tasks, a memory:// broker  else
    InvalidOption           no task runs: two workers would know nothing of each other
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from celery_idempotent.errors import InvalidOption
from celery_idempotent.settings import real_app
from celery_idempotent.stores.base import Store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery

logger = logging.getLogger(__name__)

_REDIS = ("redis", "redis+cluster", "rediss", "rediss+cluster", "sentinel", "unix")

#: What makes a store of a URL with this scheme; imported when first asked for.
_SCHEMES = {
    "django": "celery_idempotent.django.store:open_django",
    "memory": "celery_idempotent.stores.memory:open_memory",
    **dict.fromkeys(_REDIS, "celery_idempotent.stores.redis.store:RedisStore"),
    **{f"hybrid+{scheme}": "celery_idempotent.django.hybrid:open_hybrid" for scheme in _REDIS},
}
#: The packages that a store may need, each the name of an extra, too.
_EXTRAS = ("django", "redis")

_WHAT_TO_SET = (
    "set idempotency_store, for example to redis://localhost:6379/1: neither the result backend"
    " nor the broker is a Redis that could keep the idempotency records"
)

#: The store of each app.
_stores: weakref.WeakKeyDictionary[Celery, Store] = weakref.WeakKeyDictionary()
#: Those of apps that have none.
_memories: weakref.WeakKeyDictionary[Celery, Store] = weakref.WeakKeyDictionary()


def open_store(url: str) -> Store:
    """Return a store for ``url``; nothing connects before its first verb.

    Raises:
        InvalidOption: for a scheme that is not known or a URL that cannot be read.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in _SCHEMES:
        allowed = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise InvalidOption(
            f"the idempotency store's URL starts with {scheme!r}: use one of {allowed}"
            if scheme
            else f"the idempotency store is not a URL: start it with one of {allowed}"
        )
    return _resolve(_SCHEMES[scheme])(url)


def get_store(app: AnyCelery) -> Store:
    """Return the app's store, by its settings, which are read once; two apps never share one.

    An app that has none gets the memory of this process where all of it happens there: its runs are eager, or its
    broker is ``memory://``, as in Celery's fixtures.
    """
    if hasattr(app, "_get_current_object"):
        app = real_app(app)
    store = _stores.get(app) or _store_of(app)
    # Two threads may both get here; the first store stays.
    return _in_memory(app) if store is None else _stores.setdefault(app, store)


def swap_store(app: Celery, store: Store | None) -> None:
    """Let the app use this store in this process; with ``None`` its settings are read again."""
    app = real_app(app)
    _stores.pop(app, None)
    if store is not None:
        _stores[app] = store


def _runs_in_this_process(app: Celery) -> bool:
    """Is the current run an eager one, or every run of this app in this process?"""
    from celery._state import get_current_task

    request = getattr(get_current_task(), "request", None)
    if app.conf.task_always_eager or getattr(request, "is_eager", False):
        return True
    broker: object = app.conf.broker_url
    first = broker[0] if isinstance(broker, (list, tuple)) and broker else broker
    return str(first).startswith("memory://")


def _in_memory(app: Celery) -> Store:
    from celery_idempotent.stores.memory import MemoryStore

    if not _runs_in_this_process(app):
        raise InvalidOption(_WHAT_TO_SET)
    store = _memories.get(app)
    if store is None:
        logger.warning(
            "idempotency: the app %s has no store, and keeps its records in the memory of this process: that is for"
            ' tests. Say idempotency_store="memory://" if it is what you want.',
            app.main,
        )
        store = _memories.setdefault(app, MemoryStore())
    return store


def _store_of(app: Celery) -> Store | None:
    """Return a new store as the app's settings want it, ``None`` if they say nothing of one."""
    setting = app.conf.get("idempotency_store")
    if setting is None:
        backend: object = app.conf.result_backend
        is_redis = isinstance(backend, str) and backend.partition("://")[0] in _BACKENDS
        return _from_backend(app) if is_redis else _from_broker(app)
    if isinstance(setting, str):
        return open_store(setting)
    if isinstance(setting, Store):
        return setting
    raise InvalidOption(
        f"idempotency_store is a {type(setting).__name__}:"
        " give a URL or a store, a subclass of celery_idempotent.stores.base.Store"
    )


def _resolve(path: str) -> Callable[..., Store]:
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Store] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise InvalidOption(
            f"this idempotency store needs the package {error.name}: pip install 'celery-idempotent[{error.name}]'"
        ) from error
    return found


# -- the app's own Redis --

#: The schemes of Celery's own Redis result backends.
_BACKENDS = {"redis", "rediss", "redis+socket", "socket", "sentinel"}

#: Parameters of the backend's connections that the store's do not share: a pool's, those of ``redis.Redis``, and text
#: where scripts answer with bytes.
_NOT_SHARED = {"decode_responses", "hosts", "max_connections", "retry_on_timeout"}


def _from_backend(app: Celery) -> Store:
    """Open the Redis of Celery's own result backend, with the same parameters of connections."""
    from celery.app.defaults import DEFAULTS

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
    return _resolve(_SCHEMES["redis"])(url, prefix=f"{prefix}idem", options=options)


def _from_broker(app: Celery) -> Store | None:
    """Open the broker if it is one Redis."""
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
    prefix = f"{keyprefix}idem" if keyprefix else None
    return _resolve(_SCHEMES["redis"])(url, prefix=prefix, options=options)


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
