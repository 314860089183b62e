"""Runs pytest in the unpacked sdist, with the directory of the tests at the end of the path.

``python -m pytest -p tests.upstream.plugin`` would need the root of this repository in ``PYTHONPATH``, which goes
before site-packages: the package under test would be the source tree instead of the wheel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    own = {ROOT, ROOT / "tests" / "upstream"}
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in own]
    sys.path.append(str(ROOT))
    sys.exit(pytest.main(sys.argv[1:]))
