"""Django's settings of a worker of the atomic tests; the databases come from the environment."""

from __future__ import annotations

import json
import os

import pymysql

pymysql.install_as_MySQLdb()

DATABASES = json.loads(os.environ["ATOMIC_DATABASES"])
INSTALLED_APPS = ["celery_idempotent.django"]
SECRET_KEY = "for tests"
USE_TZ = True
