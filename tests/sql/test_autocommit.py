"""``DATABASES[…]["AUTOCOMMIT"] = False``: the store is refused, since what is not committed guards nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.errors import InvalidOption

pytest.importorskip("django")

from celery_idempotent.django.store import open_django
from tests.sql import databases


@pytest.mark.parametrize("vendor", databases.VENDORS)
def test_a_database_without_autocommit_is_refused(use_database: Callable[..., str], vendor: str):
    alias = use_database(vendor, AUTOCOMMIT=False)
    with pytest.raises(InvalidOption, match="leave AUTOCOMMIT on"):
        open_django(f"django://{alias}")
