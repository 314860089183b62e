"""A plain Celery app, to test the helpers that start and break workers."""

from __future__ import annotations

import os
import time

from celery import Celery

from tests.support.ledger import Ledger

app = Celery("echo", broker=os.environ["BROKER_URL"], backend=os.environ.get("RESULT_BACKEND"))
app.conf.task_default_queue = os.environ.get("QUEUE", "celery")
app.conf.broker_connection_retry_on_startup = True


@app.task(name="echo")
def echo(key: str, seconds: float = 0.0) -> str:
    """Note a start, take ``seconds``, note an end, and say the key."""
    ledger = Ledger.from_env()
    ledger.append("start", key)
    time.sleep(seconds)
    ledger.append("end", key)
    return key
