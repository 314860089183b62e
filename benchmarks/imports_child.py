"""Imports Celery, with a task of its own class or of ours; prints the CPU seconds of it, and of full GCs within."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any


def main(kind: str) -> None:
    """Import and bind."""
    collected = 0.0

    def note(phase: str, about: dict[str, int]) -> None:
        nonlocal collected
        if about["generation"] == 2:
            now = time.process_time()
            collected += now if phase == "stop" else -now

    gc.callbacks.append(note)
    begun = time.process_time()
    # Loaded by the first task that is called, whatever its class.
    import celery.app.task
    import celery.app.trace
    import celery.backends.base
    import celery.canvas
    import celery.loaders.app
    import celery.result
    import redis  # noqa: F401  the broker's, or the backend's

    app = celery.Celery("bench", broker="memory://", set_as_current=False)
    options: dict[str, Any] = {}
    if kind == "celery_idempotent":
        import celery_idempotent

        options = {"base": celery_idempotent.IdempotentTask}

    def body() -> None: ...

    define: Any = app.task  # its overloads do not know our options
    define(name="bench", **options)(body)
    app.finalize()
    print(json.dumps((time.process_time() - begun, collected)))


if __name__ == "__main__":
    main(*sys.argv[1:])
