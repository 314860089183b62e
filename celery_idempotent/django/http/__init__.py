"""The HTTP side: ``Idempotency-Key`` for Django views and Django REST framework, from the request to the task.

* :func:`idempotent_view` guards a view that does its work in the request.
* :func:`enqueue` (:func:`aenqueue` in a coroutine) hands the work to a task and answers 202 with the address of its
  status; :func:`keyed_view` checks the header of such a view before anything else.
* :mod:`celery_idempotent.django.http.urls` serves that status.
"""

from __future__ import annotations

from celery_idempotent.django.http.enqueueing import aenqueue, enqueue
from celery_idempotent.django.http.requests import session_scope
from celery_idempotent.django.http.responses import problem, status_url
from celery_idempotent.django.http.views import idempotent_view, keyed_view

__all__ = [
    "aenqueue",
    "enqueue",
    "idempotent_view",
    "keyed_view",
    "problem",
    "session_scope",
    "status_url",
]
