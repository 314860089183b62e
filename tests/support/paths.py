"""Where things are."""

from __future__ import annotations

import sys
from pathlib import Path

#: The root of the repository.
ROOT = Path(__file__).resolve().parents[2]


def find_installed_first() -> None:
    """Move the root to the end of the path: the package under test is the installed one, which is not in the root."""
    others = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
    sys.path[:] = [*others, str(ROOT)]
