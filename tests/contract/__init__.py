"""What every store must do, as tests, which a store passes unchanged."""

from __future__ import annotations

import pytest

# Each part asserts, and pytest explains only what it rewrote.
pytest.register_assert_rewrite(
    "tests.contract.cells", "tests.contract.listing", "tests.contract.many"
)

from tests.contract.cells import CellContract  # noqa: E402
from tests.contract.listing import ListingContract  # noqa: E402
from tests.contract.many import ManyContract  # noqa: E402

__all__ = ["StoreContract"]


class StoreContract(CellContract, ManyContract, ListingContract):
    """Holds a store to the contract.

    Subclass it with a fixture ``store``, a store without any record. Time has to pass, too: give a
    fixture ``advance``, which returns a function of milliseconds, if the store's clock can be
    moved; else these tests sleep, and ``lease_ms`` and ``keep_ms`` should be short::

        class TestMyStore(StoreContract):
            lease_ms = keep_ms = 300

            @pytest.fixture
            def store(self):
                return MyStore()
    """
