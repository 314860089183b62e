"""``Idempotency-Key`` for a WSGI application, such as Flask's.

::

    app.wsgi_app = IdempotencyMiddleware(
        app.wsgi_app, store="redis://localhost:6379/1", scope=bearer_scope
    )
"""

from __future__ import annotations

from collections.abc import Iterable

from celery_idempotent.http.middleware import Middleware, Request, bearer_scope, session_scope
from celery_idempotent.http.wsgi import Exchange, StartResponse

__all__ = ["IdempotencyMiddleware", "bearer_scope", "session_scope"]


class IdempotencyMiddleware(Middleware):
    """Lets requests to a WSGI application take effect once for each ``Idempotency-Key`` of a caller.

    ``scope`` is a function of the WSGI environ.
    """

    def __call__(self, environ: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        if self.guards(environ):
            return Exchange(self, environ, start_response).serve()
        unguarded: Iterable[bytes] = self.app(environ, start_response)
        return unguarded
