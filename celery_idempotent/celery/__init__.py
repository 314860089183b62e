"""Celery's side: the task, what is published, what comes back, what is checked."""
