"""What tests of idempotent tasks and of stores need; the contract of stores uses pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_idempotent.testing.clock import FakeClock
from celery_idempotent.testing.isolation import isolated_records

if TYPE_CHECKING:
    from celery_idempotent.testing.contract import StoreContract

__all__ = ["FakeClock", "StoreContract", "isolated_records"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: an application's tests may do without pytest.
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # Before the import, so that a failing contract shows what it compared.
    pytest.register_assert_rewrite("celery_idempotent.testing.contract")
    from celery_idempotent.testing.contract import StoreContract

    return StoreContract
