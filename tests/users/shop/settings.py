"""The settings of a user's project; the database and the store come from the environment."""

from __future__ import annotations

import json
import os

import pymysql

pymysql.install_as_MySQLdb()

SECRET_KEY = "for tests"
USE_TZ = True
DATABASES = json.loads(os.environ["SHOP_DATABASES"])
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "celery_idempotent.django",
    "tests.users.shop",
]
STATIC_URL = "/static/"
ROOT_URLCONF = "tests.users.shop.urls"
CELERY_TASK_ALWAYS_EAGER = True
CELERY_IDEMPOTENCY_STORE = os.environ["SHOP_STORE"]
IDEMPOTENCY_HTTP = {"scope": "tests.users.shop.views.anybody"}
CELERY_IDEMPOTENT_APP = "tests.users.shop.celery.app"
