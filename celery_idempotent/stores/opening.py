"""An app's store: ``idempotency_store``, else the Redis of its result backend or broker, else memory for tests."""

from __future__ import annotations

import logging
import pkgutil
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import InvalidOption
from celery_idempotent.settings import real_app
from celery_idempotent.stores.base import Store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery

logger = logging.getLogger(__name__)

_REDIS = ("redis", "redis+cluster", "rediss", "rediss+cluster", "sentinel", "unix")

#: The opener of each scheme's URLs, imported when first needed.
_SCHEMES = {
    "django": "celery_idempotent.django.store:open_django",
    "memory": "celery_idempotent.stores.memory:MemoryStore",
    **dict.fromkeys(_REDIS, "celery_idempotent.stores.redis.store:RedisStore"),
    **{f"hybrid+{scheme}": "celery_idempotent.django.hybrid:open_hybrid" for scheme in _REDIS},
}

#: The open stores, which the test kit replaces.
opened: weakref.WeakKeyDictionary[Celery, Store] = weakref.WeakKeyDictionary()


def open_store(url: str) -> Store:
    """Return a store for ``url``; nothing connects before its first verb."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in _SCHEMES:
        allowed = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise InvalidOption(
            f"the idempotency store's URL has the scheme {scheme!r}: use one of {allowed}"
        )
    try:
        opener: Callable[..., Store] = pkgutil.resolve_name(_SCHEMES[scheme])
    except ModuleNotFoundError as error:
        if error.name != "django":
            raise
        raise InvalidOption(
            "this idempotency store needs the package django: pip install 'celery-idempotent[django]'"
        ) from error
    return opener() if scheme == "memory" else opener(url)


def get_store(app: AnyCelery) -> Store:
    """Return the app's store, by its settings, which are read once."""
    if hasattr(app, "_get_current_object"):
        app = real_app(app)
    # Of two threads that open one, the first has it stored.
    return opened.get(app) or opened.setdefault(app, _store_of(app))


def _store_of(app: Celery) -> Store:
    setting = app.conf.get("idempotency_store")
    if isinstance(setting, str):
        return open_store(setting)
    if isinstance(setting, Store):
        return setting
    if setting is not None:
        raise InvalidOption(
            f"idempotency_store is a {type(setting).__name__}:"
            " give a URL or a store, a subclass of celery_idempotent.stores.base.Store"
        )
    backend: object = app.conf.result_backend
    brokers: Any = app.conf.broker_url
    broker = str(brokers[0] if isinstance(brokers, (list, tuple)) and brokers else brokers)
    is_redis = isinstance(backend, str) and backend.partition("://")[0] in _BACKENDS
    try:
        if is_redis:
            return _from_backend(app)
        if broker.startswith(("redis://", "rediss://")):
            return _from_broker(app)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidOption(
            f"the app's {'result_backend' if is_redis else 'broker_url'} cannot be set up"
            f" ({type(error).__name__}): correct its settings, or set idempotency_store"
        ) from None
    if app.conf.task_always_eager or broker.startswith("memory://"):
        logger.warning(
            "idempotency: the app %s has no store, and keeps its records in the memory of this process,"
            ' for tests: set idempotency_store="memory://" if that is intended',
            app.main,
        )
        return open_store("memory://")
    raise InvalidOption(
        "set idempotency_store, for example to redis://localhost:6379/1: neither the result backend"
        " nor the broker is a Redis, where records would be by default"
    )


# -- the app's own Redis --

#: The schemes of Celery's own backend of one Redis.
_BACKENDS = {"redis", "rediss", "redis+socket", "socket"}
#: Parameters of Celery's connections that the store's do not share.
_NOT_SHARED = {"decode_responses", "max_connections", "retry_on_timeout"}


def _from_backend(app: Celery) -> Store:
    from celery.app.defaults import DEFAULTS

    backend: Any = app.backend
    given = dict(backend.connparams)
    if app.conf.redis_socket_timeout == DEFAULTS["redis_socket_timeout"]:
        # Celery's default of two minutes: a task must not wait for its claim that long.
        given["socket_timeout"] = None
    prefix = backend.task_keyprefix.decode().removesuffix(type(backend).task_keyprefix)
    return _redis(given, prefix)


def _from_broker(app: Celery) -> Store:
    client: Any = app.connection_for_write()
    if len(client.alt) > 1:
        raise InvalidOption(
            "broker_url fails over from one server to another, but records do not: set idempotency_store"
            " to the Redis that keeps them"
        )
    given = {"host": client.hostname, "port": client.port}
    given |= {"username": client.userid, "password": client.password}
    given["db"] = int(client.virtual_host.strip("/") or 0)
    if client.ssl:
        from redis import SSLConnection

        tls = client.ssl if isinstance(client.ssl, Mapping) else {}
        given |= {**tls, "connection_class": SSLConnection}
    return _redis(given, client.transport_options.get("global_keyprefix", ""))


def _redis(given: Mapping[str, Any], prefix: str) -> Store:
    from celery_idempotent.stores.redis.store import RedisStore

    options = {k: v for k, v in given.items() if v is not None and k not in _NOT_SHARED}
    return RedisStore("redis://", prefix=f"{prefix}idem", options=options)
