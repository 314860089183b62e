"""The app of both sides: a worker makes it from its environment, a test for itself."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from tests.delivery import beside_tasks
from tests.delivery.recorder import Recorder, watch

#: The settings of a worker as JSON: those of :func:`make_app` and the path of its record.
VARIABLE = "CELERY_IDEMPOTENT_TEST_DOCUMENTED"

PLAIN = "celery.app.task:Task"
OURS = "celery_idempotent:IdempotentTask"


def make_app(task_cls: str, conf: dict[str, Any]) -> Celery:
    """Return an app with every task of the scenarios, all of the given class."""
    app = Celery("documented", task_cls=task_cls, set_as_current=False)
    app.conf.update(conf)
    beside_tasks.register(app)
    return app


if VARIABLE in os.environ:
    given = json.loads(os.environ[VARIABLE])
    app = make_app(given["task_cls"], given["conf"])
    app.set_default()
    app.set_current()
    watch(Recorder(given["record"]))
