"""What tests of idempotent tasks and of stores need; uses pytest."""

from __future__ import annotations

import pytest

# Before the import, so that a failing contract shows what it compared.
pytest.register_assert_rewrite("celery_idempotent.testing.contract")

from celery_idempotent.testing.clock import FakeClock  # noqa: E402
from celery_idempotent.testing.contract import StoreContract  # noqa: E402

__all__ = ["FakeClock", "StoreContract"]
