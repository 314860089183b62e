"""Whether Django's own test tools are at work, which undo what a test wrote and drop its database.

A ``TestCase`` keeps each test in a transaction of the thread's connection and rolls it back, so whatever is to be gone
with the test has to be written there, by the thread of the test.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def in_testcase(own: BaseDatabaseWrapper) -> bool:
    """Is the thread's connection in the transaction of a ``TestCase``, which will be rolled back?"""
    blocks = own.atomic_blocks
    return bool(blocks) and bool(getattr(blocks[0], "_from_testcase", False))


def under_test() -> bool:
    """Is Django's test environment set up (``manage.py test``, pytest-django)?"""
    utils = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")
