"""A verb that a signal interrupts in the middle of an exchange: its connection is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("django")

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.protocol.shield import VerbInterruptedError
from celery_idempotent.records import Claimed
from tests.sql.verbs import KEY, claim


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
