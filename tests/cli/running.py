"""Command lines in processes of their own, forked from one that has imported Celery."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.preloaded import spawn
from tests.support.workers import child_environment

__all__ = ["Ran", "run_idempotency"]


@dataclass(frozen=True)
class Ran:
    """What a command wrote, on both of its outputs, and how it ended."""

    code: int
    text: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects among its lines."""
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]


def run_idempotency(app: str, env: Mapping[str, object], *words: str) -> Ran:
    """Run ``celery -A app idempotency …`` to its end."""
    command = [sys.executable, "-m", "celery", "-A", app, "idempotency", *words]
    with tempfile.TemporaryFile() as log:
        process = spawn(command, cwd=Path("/"), env=child_environment(env), log=log)
        code = process.wait(60)
        log.seek(0)
        return Ran(code, log.read().decode())
