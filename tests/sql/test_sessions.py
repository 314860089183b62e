"""Sessions of the store that are silent, lost, or interrupted in the middle of an exchange: bounded, and replaced."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from django.db import InternalError, OperationalError, connections
from django.db.backends.signals import connection_created

from celery_idempotent import IdempotentTask
from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.sql.dialects import kind
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.shield import VerbInterruptedError
from celery_idempotent.records import Claimed
from celery_idempotent.stores import get_store
from celery_idempotent.testing import deliver_at_once
from tests.sql.databases import rows
from tests.sql.verbs import KEY, claim, renewal
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
    connection = DjangoStore(alias).connections._new().connection
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    assert all(options[name] > 0 for name in bounds)
    assert options["connect_timeout"] == 7, "the project's own come first"


@pytest.mark.parametrize("vendor", list(BOUNDS))
def test_a_database_that_is_away_is_asked_once_more(
    use_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch, vendor: str
):
    """The first loss may be that of an idle session; after the second the caller decides when to try again."""
    alias = use_database(vendor)
    connections[alias].close()
    connections.databases[alias].update(PORT="1", PASSWORD="geheim")
    del connections[alias]
    tries, new = list[Connections](), Connections._new

    def connect(own: Connections) -> Session:
        tries.append(own)
        assert len(tries) < 5
        return new(own)

    monkeypatch.setattr(Connections, "_new", connect)
    with pytest.raises(StoreUnavailable, match=alias) as caught:
        claim(DjangoStore(alias))
    assert "geheim" not in str(caught.value)
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("vendor", "code"),
    [
        *(("postgresql", code) for code in ("25P03", "25P04", "57P05", "57P01", "08006")),
        *(("mysql", code) for code in (1153, 1290, 2006, 2013, 4031)),
    ],
)
def test_what_ends_a_session_is_known_by_its_code(vendor: str, code: Any):
    error: Any = OperationalError(code, "gone") if vendor == "mysql" else InternalError("gone")
    if vendor == "postgresql":
        error.sqlstate = code
    assert kind(error, vendor) == "lost"


def test_deliveries_at_once_leave_no_connection_open(
    use_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    # The heartbeat's thread writes what they counted when it is time, with a connection of the store.
    monkeypatch.setattr(DjangoStore, "supports_counting", False)
    alias = use_database("postgresql")
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=f"django://{alias}")

    @app.task(base=IdempotentTask, name="pay", shared=False, idempotency_key="order")
    def pay(order: str) -> int:
        return len(rows(alias, "SELECT 1"))

    opened: list[Any] = []

    def note(connection: Any, **_: object) -> None:
        if connection.alias == alias:
            opened.append(connection)

    connections[alias].close()
    connection_created.connect(note)
    try:
        assert len(deliver_at_once(pay, 3, "17")) == 3
    finally:
        connection_created.disconnect(note)
    get_store(app).close()
    assert opened
    assert [each for each in opened if each.connection is not None] == []


# SQLite is in this process: there is no exchange that could be cut.
@pytest.mark.parametrize("vendor", ["postgresql", "mariadb"])
def test_the_connection_of_an_interrupted_claim_is_not_used_again(
    vendor: str, open_store: Callable[..., DjangoStore], monkeypatch: pytest.MonkeyPatch
):
    store = open_store(vendor)
    store.get(KEY)  # connects
    real = Session.rows
    struck: list[tuple[Any, object]] = []

    def strike(self: Session, *args: Any) -> Any:
        real(self, *args)
        monkeypatch.undo()
        struck.append((self.connection, self.connection.connection))
        raise VerbInterruptedError

    monkeypatch.setattr(Session, "rows", strike)
    with pytest.raises(VerbInterruptedError):
        claim(store, attempt=b"12345678")
    ((wrapper, used),) = struck
    assert wrapper.connection is not used
    assert isinstance(claim(store, attempt=b"12345678"), Claimed)
