"""From a URL, or from an app's own Redis, to a store.

Celery writes the URLs of some servers in other ways than the stores do; here they become ours::

    socket:///run/redis.sock?virtual_host=1              unix:///run/redis.sock?db=1
    sentinel://s1/0;sentinel://s2, master_name="main"    sentinel://s1;s2/main/0
    redis://one;redis://two                              redis://one: records do not move with a failover
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores.base import Store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores.hybrid.cache import RedisCache


def memory(_url: str) -> Store:
    """Open ``memory://``."""
    from celery_idempotent.stores.memory import MemoryStore

    return MemoryStore()


def redis(url: str) -> Store:
    """Open any URL that :class:`~celery_idempotent.stores.redis.store.RedisStore` reads."""
    from celery_idempotent.stores.redis.store import RedisStore

    return RedisStore(url)


def hybrid(url: str) -> tuple[RedisCache, str]:
    """Return the cache of ``hybrid+redis://…?truth=alias``, and the URL of the truth behind it.

    ``truth`` is the alias of a Django database (``default``), or a URL.
    """
    from celery_idempotent.stores.hybrid.cache import RedisCache

    address, _, query = url.removeprefix("hybrid+").partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    truths = [value for name, value in options if name == "truth"] or ["default"]
    truth = truths[0] if "://" in truths[0] else f"django://{truths[0]}"
    if len(truths) > 1 or not truths[0] or truth.startswith("hybrid+"):
        raise InvalidOption(
            "a hybrid store's URL names one truth: ?truth=alias, a Django database, or no truth"
            " for the alias 'default'"
        )
    rest = urlencode([(name, value) for name, value in options if name != "truth"])
    return RedisCache(address + ("?" + rest if rest else "")), truth


def from_app(app: Celery) -> Store | None:
    """Open the Redis of the app's result backend, or else of its broker; ``None`` if neither is one.

    The ``global_keyprefix`` that keeps apps on one server apart starts our keys as well.
    """
    from celery_idempotent.stores.redis.store import RedisStore

    for url, kind, use_ssl in (
        (app.conf.result_backend, "result_backend", "redis_backend_use_ssl"),
        (app.conf.broker_url, "broker", "broker_use_ssl"),
    ):
        transport = app.conf.get(f"{kind}_transport_options") or {}
        ours = _redis_url(url, transport)
        if ours is None:
            continue
        tls = app.conf.get(use_ssl)
        options = _options(tls, transport, sentinel=ours.startswith("sentinel://"))
        if tls and ours.startswith("redis://"):
            ours = "rediss" + ours.removeprefix("redis")
        keyprefix = transport.get("global_keyprefix")
        prefix = f"{keyprefix}idem" if keyprefix else None
        return RedisStore(ours, prefix=prefix, options=options)
    return None


def _redis_url(url: object, transport: Mapping[str, object]) -> str | None:
    """Return Celery's URL of a Redis in our form, ``None`` if it is something else."""
    if isinstance(url, (list, tuple)):
        url = ";".join(url)
    if not isinstance(url, str):
        return None
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss"):
        # Of several brokers to fail over to, the first: records that move with the broker would be
        # no records.
        address, _, query = url.split(";")[0].partition("?")
        # kombu reads its own options from the query; what concerns the connection itself is ours as
        # well.
        tls = [(k, v) for k, v in parse_qsl(query) if k.startswith("ssl_")]
        return (address if "://" in address else f"{scheme}://") + (
            "?" + urlencode(tls) if tls else ""
        )
    if scheme in ("socket", "redis+socket"):
        return _unix_url(rest)
    if scheme == "sentinel":
        return _sentinel_url(url, transport)
    return None


def _unix_url(rest: str) -> str:
    parts = urlsplit(f"unix://{rest}")
    query = dict(parse_qsl(parts.query))
    db = query.get("virtual_host", "0").strip("/") or "0"
    user = parts.netloc.rpartition("@")[0]
    return f"unix://{user}{'@' if user else ''}{parts.path}?db={db}"


def _sentinel_url(url: str, transport: Mapping[str, object]) -> str:
    """Read ``sentinel://:secret@h1/0;sentinel://h2``, whose master the transport options name."""
    master = transport.get("master_name")
    if not master:
        raise InvalidOption(
            "the app's Sentinel has no master_name in its transport options:"
            " set it there, or set idempotency_store"
        )
    user, db, hosts = "", "", []
    for part in url.split(";"):
        authority, _, path = part.removeprefix("sentinel://").partition("/")
        of_part, _, host = authority.rpartition("@")
        hosts.append(host)
        user = user or of_part
        db = db or path.partition("?")[0].strip("/")
    return (
        f"sentinel://{user}{'@' if user else ''}{';'.join(hosts)}/{quote(str(master))}/{db or '0'}"
    )


def _options(tls: object, transport: Mapping[str, object], *, sentinel: bool) -> dict[str, object]:
    """Return what Celery's settings say about the connections themselves."""
    options: dict[str, object] = dict(tls) if isinstance(tls, Mapping) else {}
    if sentinel:
        options["sentinel_kwargs"] = transport.get("sentinel_kwargs")
        options["ssl"] = bool(tls)
    return options
