"""Django's settings of a worker of the hybrid tests; the databases come from the environment."""

from __future__ import annotations

import json
import os

DATABASES = json.loads(os.environ["HYBRID_DATABASES"])
INSTALLED_APPS = ["celery_idempotent.django"]
SECRET_KEY = "for tests"
USE_TZ = True
