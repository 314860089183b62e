"""The helpers of the matrix assert, too: let pytest explain them."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.matrix.cells", "tests.matrix.scenarios")
