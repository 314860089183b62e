"""Runs, independent of Celery's workers: claim, run, settle or release."""
