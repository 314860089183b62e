"""``Idempotency-Key`` for a WSGI application, such as Flask's.

::

    app.wsgi_app = IdempotencyMiddleware(
        app.wsgi_app, store="redis://localhost:6379/1", scope=bearer_scope
    )
"""

from __future__ import annotations

from celery_idempotent.http.middleware import IdempotencyMiddleware, bearer_scope

__all__ = ["IdempotencyMiddleware", "bearer_scope"]
