"""A verb that a signal interrupts in the middle of an exchange: its connection is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import connections

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
    kind = type(connections[store.alias])
    real = kind.create_cursor
    struck: list[tuple[Any, object]] = []

    def strike(self: Any, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs)
        monkeypatch.undo()
        struck.append((self, self.connection))
        raise VerbInterruptedError

    monkeypatch.setattr(kind, "create_cursor", strike)
    with pytest.raises(VerbInterruptedError):
        claim(store, attempt=b"12345678")
    ((wrapper, used),) = struck
    assert wrapper.connection is not used
    assert isinstance(claim(store, attempt=b"12345678"), Claimed)
