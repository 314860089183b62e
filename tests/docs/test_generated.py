"""What pages have from the code is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generated, timelines


@pytest.mark.parametrize("page", generated.pages(), ids=lambda page: page.name)
def test_a_page_has_what_the_code_says(page: Path) -> None:
    text = page.read_text()
    assert generated.fill(text) == text, "`make format` writes it anew"


def test_every_generated_part_has_its_page() -> None:
    text = "".join(page.read_text() for page in generated.pages())
    for name in generated.GENERATED:
        assert text.count(f"<!-- generated: {name} -->") == 1


def test_the_picture_of_timelines_is_drawn_from_its_text() -> None:
    assert timelines.PICTURE.read_text() == timelines.draw(), "`make format` draws it anew"
