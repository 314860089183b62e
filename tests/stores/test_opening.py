"""A URL or an app's settings become a store, one for each app, and no password is told."""

from __future__ import annotations

import gc
import ssl
import weakref
from typing import Any

import pytest
import redis
from celery import Celery, current_app
from redis.credentials import UsernamePasswordCredentialProvider

from celery_idempotent import stores
from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.store import RedisStore
from tests.support.programs import run
from tests.support.threads import all_at_once

NO_CERTIFICATE = {"ssl_cert_reqs": ssl.CERT_NONE}


# As for a store that is not typed as one: tests look into it.
open_store: Any = stores.open_store
get_store: Any = stores.get_store


def new_app(**settings) -> Celery:
    app = Celery("opening", set_as_current=False)
    app.conf.update(settings)
    return app


def connection(store):
    """Return a connection of the store, not connected."""
    pool = store._link.pool
    return pool.connection_class(**pool.connection_kwargs)


class TestURLs:
    @pytest.mark.parametrize(
        ("url", "where"),
        [
            ("redis://", "Redis at localhost:6379"),
            ("redis://cache.example:7000/3", "Redis at cache.example:7000"),
            ("rediss://:secret@cache.example/3", "Redis at cache.example:6379"),
            ("unix:///run/redis.sock?db=3", "Redis at /run/redis.sock"),
            ("sentinel://a;b:2/main/3", "Redis master main of Sentinel at a;b:2"),
            ("redis+cluster://u:p@a:1,b", "Redis Cluster at a:1,b"),
            ("rediss+cluster://a:1", "Redis Cluster at a:1"),
        ],
    )
    def test_a_redis_url_opens_a_redis_store(self, url, where):
        store = open_store(url)
        assert isinstance(store, RedisStore)
        assert store._link.where == where
        assert store.prefix == "idem"
        assert "secret" not in repr(store)
        assert open_store(f"{url}{'&' if '?' in url else '?'}prefix=mine").prefix == "mine"

    def test_the_parts_of_a_url_reach_the_connection(self):
        made = connection(open_store("rediss://u:p%40@h:1/2?socket_timeout=3&ssl_cert_reqs=none"))
        assert (made.host, made.port, made.db) == ("h", 1, 2)
        assert (made.username, made.password, made.socket_timeout) == ("u", "p@", 3)
        assert made.cert_reqs == ssl.CERT_NONE

    @pytest.mark.parametrize("url", ["mysql://u:hunter2@h", "hunter2", "", "redis:/h"])
    def test_an_unknown_scheme_is_told_what_is_allowed(self, url):
        with pytest.raises(InvalidOption, match=r"redis://, .*unix://") as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://:hunter2#x@h:1",
            "redis://:hunter2/x@h:y",
            "redis://h:hunter2",
            "redis://h?hunter=2",
            "redis://h?socket_timeout=hunter2",
            "sentinel://:hunter2@h",
            "sentinel://:hunter2@/main",
            "sentinel://h:hunter2/main",
            "redis+cluster://",
        ],
    )
    def test_a_url_that_cannot_be_read_is_refused_and_not_told(self, url):
        with pytest.raises(InvalidOption) as caught:
            open_store(url)
        error: BaseException | None = caught.value
        while error is not None:
            assert "hunter2" not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)

    def test_nothing_optional_is_imported_before_it_is_asked_for(self):
        code = (
            "import sys; import celery_idempotent.stores as s; s.open_store('memory://');"
            "sys.exit('redis' in sys.modules or 'celery' in sys.modules)"
        )
        run("-c", code)


class TestApps:
    def test_the_setting_wins(self):
        app = new_app(idempotency_store="memory://", result_backend="redis://h")
        assert isinstance(get_store(app), MemoryStore)

    def test_the_setting_may_be_a_store(self):
        store = MemoryStore()
        assert get_store(new_app(idempotency_store=store)) is store

    def test_the_setting_may_come_through_djangos_namespace(self):
        app = Celery("django", set_as_current=False)
        app.config_from_object({"CELERY_IDEMPOTENCY_STORE": "memory://"}, namespace="CELERY")
        assert isinstance(get_store(app), MemoryStore)

    @pytest.mark.parametrize(
        ("settings", "where", "db"),
        [
            ({"result_backend": "redis://a/1", "broker_url": "redis://b/2"}, "a:6379", 1),
            ({"result_backend": "rpc://", "broker_url": "redis://b/2"}, "b:6379", 2),
            ({"result_backend": "db+sqlite://", "broker_url": "redis://b:7//"}, "b:7", 0),
            ({"broker_url": ["redis://b:7/3"]}, "b:7", 3),
            ({"result_backend": "redis"}, "localhost:6379", 0),
            ({"result_backend": "redis", "redis_host": "a", "redis_port": 7}, "a:7", 0),
            ({"result_backend": "redis", "redis_db": 5}, "localhost:6379", 5),
            ({"result_backend": "redis+socket:///run/r?virtual_host=4"}, "/run/r", 4),
        ],
    )
    def test_without_a_setting_it_is_the_apps_own_redis(self, settings, where, db):
        store = get_store(new_app(**settings))
        assert store._link.where == f"Redis at {where}"
        assert connection(store).db == db

    def test_the_settings_of_celerys_redis_backend_hold_for_records(self):
        """Results went to the configured server, and records silently to localhost."""
        server = {"host": "a", "port": 7000, "username": "u", "password": "pw"}
        server |= {"socket_timeout": 9, "socket_connect_timeout": 3, "socket_keepalive": True}
        settings = {f"redis_{name}": value for name, value in server.items()}
        settings["redis_backend_health_check_interval"] = 30
        app = new_app(result_backend="redis://", **settings)
        made = connection(get_store(app))
        assert (made.host, made.port, made.username, made.password) == ("a", 7000, "u", "pw")
        assert (made.socket_timeout, made.socket_connect_timeout) == (9, 3)
        assert (made.socket_keepalive, made.health_check_interval) == (True, 30)

    def test_celerys_own_timeout_of_two_minutes_is_not_taken(self):
        made = connection(get_store(new_app(result_backend="redis://h")))
        assert (made.socket_timeout, made.socket_connect_timeout) == (5, 2)

    def test_a_credential_provider_of_the_backend_logs_in(self):
        provider = UsernamePasswordCredentialProvider("u", "pw")
        app = new_app(result_backend="redis://h", redis_backend_credential_provider=provider)
        if "credential_provider" not in app.backend.connparams:
            pytest.skip("this Celery has no such setting")
        assert connection(get_store(app)).credential_provider is provider

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"broker_url": ["redis://b:7/3", "redis://c"]}, r"fails over .*idempotency_store"),
            ({"broker_url": "redis://b:7/3;redis://c"}, "fails over"),
            ({"broker_url": "redis://:hunter2@b;amqp://c"}, "fails over"),
            ({"result_backend": "rediss://:hunter2@h"}, "result_backend"),
            ({"broker_url": "amqp://u:hunter2@h"}, "set idempotency_store"),
            ({"result_backend": "sentinel://:hunter2@a:1/2"}, "set idempotency_store"),
            ({"broker_url": "sentinel://:hunter2@a:1/2"}, "set idempotency_store"),
            ({"idempotency_store": 7}, "int"),
        ],
    )
    def test_an_app_whose_servers_keep_no_records_is_told_what_to_set(self, settings, said):
        with pytest.raises(InvalidOption, match=said) as caught:
            get_store(new_app(**{"result_backend": "rpc://", **settings}))
        assert "hunter2" not in str(caught.value)

    def test_tls_holds_for_masters_and_sentinels(self):
        url = "sentinel://:pw@a:1/main/2?ssl=true&ssl_cert_reqs=CERT_NONE&sentinel_password=spw"
        pool = open_store(url)._link.pool
        (sentinel,) = pool.sentinel_manager.sentinels
        master = pool.connection_class(**pool.connection_kwargs)
        kwargs = sentinel.connection_pool.connection_kwargs
        watcher = sentinel.connection_pool.connection_class(**kwargs)
        for made in (master, watcher):
            assert isinstance(made, redis.SSLConnection)
            assert made.cert_reqs == ssl.CERT_NONE
            assert made.socket_timeout == 5
        assert (master.password, master.db, watcher.password) == ("pw", 2, "spw")

    @pytest.mark.parametrize("kind", ["result_backend", "broker"])
    def test_the_apps_key_prefix_starts_our_keys(self, kind):
        url = {"broker": "broker_url"}.get(kind, kind)
        options = {f"{kind}_transport_options": {"global_keyprefix": "shop_"}}
        assert get_store(new_app(**{url: "redis://h"}, **options)).prefix == "shop_idem"

    @pytest.mark.parametrize(
        "settings",
        [
            {"result_backend": "redis://h", "redis_backend_use_ssl": NO_CERTIFICATE},
            {"broker_url": "redis://h", "broker_use_ssl": NO_CERTIFICATE},
            {"broker_url": "rediss://h?ssl_cert_reqs=CERT_NONE"},
        ],
    )
    def test_the_apps_tls_settings_hold(self, settings):
        assert connection(get_store(new_app(**settings))).cert_reqs == ssl.CERT_NONE

    def test_an_app_always_gets_the_same_store(self):
        app = new_app(idempotency_store="memory://")
        assert set(all_at_once(8, lambda _: get_store(app))) == {get_store(app)}

    def test_a_proxy_stands_for_its_app(self):
        app = new_app(idempotency_store="memory://")
        app.set_current()
        assert get_store(current_app) is get_store(app)

    def test_a_store_goes_with_its_app(self):
        app = new_app(idempotency_store="memory://")
        gone = weakref.ref(get_store(app))
        app.close()
        del app
        gc.collect()
        assert gone() is None
