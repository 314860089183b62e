"""The test project's settings, with views of all kinds beside its own."""

from __future__ import annotations

import json
import os

from testproject import settings as project
from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.http.urls"
IDEMPOTENCY_HTTP = {"lease": 3, "docs_url": "https://docs.example/idempotency"}

#: A test's own database, as JSON; and whether each request is a transaction there.
if "TEST_DATABASE" in os.environ:
    DATABASES = {"default": json.loads(os.environ["TEST_DATABASE"])}
    IDEMPOTENCY_HTTP["lease"] = 2
else:
    DATABASES = project.DATABASES
