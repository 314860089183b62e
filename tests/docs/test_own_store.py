"""The complete store of the reference, held to the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.testing import FakeClock
from tests.contract import StoreContract
from tests.docs.test_docs import REFERENCE, blocks


class TestTheStoreOfTheReference(StoreContract):
    brief = True

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, clock: FakeClock, tmp_path: Path) -> Any:
        (example,) = (each for each in blocks(REFERENCE) if "class SqliteStore" in each)
        module: dict[str, Any] = {"__name__": "sqlite_store"}
        exec(example, module)
        return module["SqliteStore"](tmp_path / "records.sqlite3", clock)

    @pytest.fixture
    def advance(self, clock: FakeClock) -> Any:
        return clock.advance
