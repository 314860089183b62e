"""What a type checker lets pass works, too."""

from __future__ import annotations

from tests.typing import shop


def test_a_program_that_mypy_accepts_runs() -> None:
    assert shop.calls() == ["k", "z", "tests.typing.shop.elsewhere"]
