"""The announced differences, as the documentation lists them: the one place where they are written down."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

_PAGE = ROOT / "docs" / "differences.md"


def announced() -> dict[str, str]:
    """Return the text of each announced difference by its name, which is its heading's."""
    parts = re.split(r"^## .*?`([a-z-]+)`.*$", _PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
