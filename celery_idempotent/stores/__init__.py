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
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from celery_idempotent.errors import InvalidOption
from celery_idempotent.settings import real_app
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery

__all__ = ["ATTEMPT_BYTES", "Store", "get_store", "open_store", "swap_store"]

logger = logging.getLogger(__name__)

#: The entry points of other packages: the name is the scheme, the value opens its URLs, as :func:`open_store` does.
GROUP = "celery_idempotent.stores"

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

    Raises
    :exc:`~celery_idempotent.errors.InvalidOption` for a scheme that is not known or a URL that
    cannot be read.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    return _opener(scheme)(url)


def _opener(scheme: str) -> Callable[..., Store]:
    """Return what opens URLs with this scheme: ours first, so that no other package can take one of them."""
    if scheme in _SCHEMES:
        return _resolve(_SCHEMES[scheme])
    others = entry_points(group=GROUP)
    if scheme not in others.names:
        allowed = ", ".join(f"{name}://" for name in sorted({*_SCHEMES, *others.names}))
        raise InvalidOption(
            f"the idempotency store's URL starts with {scheme!r}: use one of {allowed}"
            if scheme
            else f"the idempotency store is not a URL: start it with one of {allowed}"
        )
    opener: Callable[..., Store] = others[scheme].load()
    return opener


def get_store(app: AnyCelery) -> Store:
    """Return the app's store.

    It is the setting ``idempotency_store``, else the Redis of the app's result backend or of its broker.

    The settings are read once: the same app always gets the same store, also in a child that it
    forked; two apps never share one. An app that has none gets the memory of this process where
    all of it happens there: its runs are eager, or its broker is ``memory://``, as in Celery's
    fixtures.
    """
    app = real_app(app)
    known = _stores.get(app)
    if known is not None:
        return known
    made = _store_of(app)
    if made is None:
        if not _all_is_here(app):
            raise InvalidOption(_WHAT_TO_SET)
        return _in_memory(app)
    # Two threads may both get here; the first store stays.
    return _stores.setdefault(app, made)


def swap_store(app: Celery, store: Store | None) -> None:
    """Let the app use this store in this process; with ``None`` its settings are read again."""
    app = real_app(app)
    _stores.pop(app, None)
    if store is not None:
        _stores[app] = store


def _all_is_here(app: Celery) -> bool:
    """Does all of it happen in this very process: the run at work, or every run of this app?"""
    from celery._state import get_current_task

    request = getattr(get_current_task(), "request", None)
    if app.conf.task_always_eager or getattr(request, "is_eager", False):
        return True
    broker: object = app.conf.broker_url
    first = broker[0] if isinstance(broker, (list, tuple)) and broker else broker
    return str(first).startswith("memory://")


def _in_memory(app: Celery) -> Store:
    from celery_idempotent.stores.memory import MemoryStore

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
        found: Store | None = _resolve("celery_idempotent.stores.opening:from_app")(app)
        return found
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
            f"this idempotency store needs the package {error.name}:"
            f" pip install 'celery-idempotent[{error.name}]'"
        ) from error
    return found
