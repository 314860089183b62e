"""A server that accepts connections and then stays silent is waited for as long as its options say, and no longer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Claimed
from tests.sql.verbs import claim, renewal
from tests.support.proxy import Proxy

BOUNDS = {
    "postgresql": {"connect_timeout": 2, "keepalives_idle": 10, "tcp_user_timeout": 20_000},
    "mariadb": {"connect_timeout": 1, "read_timeout": 1, "write_timeout": 1},
}


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts, and that is all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("vendor", list(BOUNDS))
def test_a_claim_at_a_silent_server_ends_with_the_bound_for_connecting(
    use_database: Callable[..., str], silent: int, vendor: str
):
    alias = use_database(vendor)
    connections[alias].close()
    settings = connections.databases[alias]
    settings.update(PORT=str(silent), OPTIONS={**settings["OPTIONS"], **BOUNDS[vendor]})
    del connections[alias]
    store = DjangoStore(alias)
    since = time.monotonic()
    with pytest.raises(StoreUnavailable):
        claim(store)
    assert time.monotonic() - since < 60


def test_a_renewal_on_an_open_connection_ends_with_the_bound_for_an_answer(
    use_database: Callable[..., str],
):
    alias = use_database("mariadb")
    connections[alias].close()
    settings = connections.databases[alias]
    with Proxy(settings["HOST"], int(settings["PORT"])) as proxy:
        settings.update(PORT=str(proxy.port))
        settings["OPTIONS"] = {**settings["OPTIONS"], **BOUNDS["mariadb"]}
        del connections[alias]
        store = DjangoStore(alias)
        answer = claim(store)
        assert isinstance(answer, Claimed)
        lease = renewal(answer.record)
        proxy.swallow_replies(b"UPDATE celery_idempotent_record", times=None, silent=True)
        with pytest.raises(StoreUnavailable):
            store.renew([lease])
        assert proxy.swallowed == 2, "done again on another connection"
        proxy.heal()
        assert store.renew([lease]) == [True]
        store.close()
        connections[alias].close()


@pytest.mark.parametrize("vendor", list(BOUNDS))
def test_the_connections_of_the_store_have_bounds_of_their_own(
    use_database: Callable[..., str], vendor: str
):
    alias = use_database(vendor)
    bounds = BOUNDS[vendor].keys() - {"connect_timeout"}
    connections.databases[alias]["OPTIONS"].update(connect_timeout=7)
    options = DjangoStore(alias).connections._new().connection.settings_dict["OPTIONS"]
    assert all(options[name] > 0 for name in bounds)
    assert options["connect_timeout"] == 7, "the project's own come first"
