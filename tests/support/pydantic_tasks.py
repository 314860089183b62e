"""Tasks that take pydantic models, which Celery dumps for their messages since 5.7."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task


def make_pydantic_task(app: Celery, body: Any, *, model: Any = None, **options: Any) -> Any:
    """Return a task of ``body``, whose argument ``order`` is such a model, and the model."""
    pydantic = pytest.importorskip("pydantic")
    if not hasattr(Task, "_dump_pydantic_arguments"):
        pytest.skip("Celery 5.7 is the first that takes models")
    model = model or pydantic.create_model("Order", id=(int, ...))
    body.__annotations__["order"] = model
    return app.task(pydantic=True, shared=False, **options)(body), model
