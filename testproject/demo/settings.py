"""The project's settings, in a hurry: what takes hours in production takes seconds here."""

from __future__ import annotations

import os
from pathlib import Path

from testproject import settings as project
from testproject.settings import *  # noqa: F403 -- this is how Django's settings are derived

CELERY_IMPORTS = ["testproject.demo.rehearsal"]

#: The directory of all that this run of the demo writes.
DEMO_DIRECTORY = Path(os.environ["DATABASE_PATH"]).parent

# The default hour, as two seconds: what a worker has had for longer, the broker hands to another.
# The look-out is every second instead of every hundred (Celery 5.7).
CELERY_BROKER_TRANSPORT_OPTIONS = {
    **project.CELERY_BROKER_TRANSPORT_OPTIONS,
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    # A worker that is killed while it hands messages back must not delay it for long.
    "unacked_mutex_expire": 3,
}
# A killed worker's claim is in the way for this long. The lease has to outlive a busy machine's
# pauses, or a run that is alive loses it: five seconds for two cores that are full.
CELERY_IDEMPOTENCY_LEASE = 5
CELERY_IDEMPOTENCY_SWEEP_INTERVAL = 1
# A delivery may be struck by each of the kills: it is not to be given up as poison.
CELERY_IDEMPOTENCY_MAX_CRASHES = 10
# Housekeeping does not wait behind the backlog that a killed worker leaves.
CELERY_TASK_ROUTES = {"celery_idempotent.sweep": {"queue": "housekeeping"}}
CELERY_BEAT_MAX_LOOP_INTERVAL = 0.5
