"""What every store must do, as tests, which a store passes unchanged."""

from __future__ import annotations

import pytest

# Each part asserts, and pytest explains only what it rewrote.
pytest.register_assert_rewrite(
    "celery_idempotent.testing.contract.cells",
    "celery_idempotent.testing.contract.claims",
    "celery_idempotent.testing.contract.endings",
    "celery_idempotent.testing.contract.identities",
    "celery_idempotent.testing.contract.interventions",
    "celery_idempotent.testing.contract.listing",
    "celery_idempotent.testing.contract.messages",
    "celery_idempotent.testing.contract.refusals",
    "celery_idempotent.testing.contract.releases",
    "celery_idempotent.testing.contract.renewals",
    "celery_idempotent.testing.contract.requeues",
    "celery_idempotent.testing.contract.reservations",
    "celery_idempotent.testing.contract.steps",
    "celery_idempotent.testing.contract.upkeep",
)

from celery_idempotent.testing.contract.cells import CellContract  # noqa: E402
from celery_idempotent.testing.contract.claims import ClaimContract  # noqa: E402
from celery_idempotent.testing.contract.endings import EndingContract  # noqa: E402
from celery_idempotent.testing.contract.identities import IdentityContract  # noqa: E402
from celery_idempotent.testing.contract.interventions import InterventionContract  # noqa: E402
from celery_idempotent.testing.contract.listing import ListingContract  # noqa: E402
from celery_idempotent.testing.contract.messages import MessageContract  # noqa: E402
from celery_idempotent.testing.contract.refusals import RefusalContract  # noqa: E402
from celery_idempotent.testing.contract.releases import ReleaseContract  # noqa: E402
from celery_idempotent.testing.contract.renewals import RenewalContract  # noqa: E402
from celery_idempotent.testing.contract.requeues import RequeueContract  # noqa: E402
from celery_idempotent.testing.contract.reservations import ReservationContract  # noqa: E402
from celery_idempotent.testing.contract.steps import StepContract  # noqa: E402
from celery_idempotent.testing.contract.upkeep import UpkeepContract  # noqa: E402

__all__ = ["StoreContract"]


class StoreContract(
    CellContract,
    ClaimContract,
    RenewalContract,
    EndingContract,
    ReleaseContract,
    ReservationContract,
    StepContract,
    RequeueContract,
    MessageContract,
    RefusalContract,
    InterventionContract,
    UpkeepContract,
    ListingContract,
    IdentityContract,
):
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
