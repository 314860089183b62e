"""A small webhook receiver: a Django project to try the library on, the stage of ``make demo``."""

from testproject.celery import app as celery_app

__all__ = ["celery_app"]
