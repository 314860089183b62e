"""The admin for apps without Django: a Django of this process alone, without a database, over the app's own store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from socketserver import ThreadingMixIn
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from django.conf import settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, URLResolver, path
from django.views.generic import RedirectView

from celery_idempotent.celery.operations import OPERATIONS
from celery_idempotent.django.applications import APP_SETTING
from celery_idempotent.errors import InvalidOption

if TYPE_CHECKING:
    from celery import Celery

_LABEL = "celery_idempotent"
_LOOPBACK = "127.0.0.1"
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'self'"
_CONTRIB = ("admin", "auth", "contenttypes", "messages", "staticfiles")
_ENGINE = "django.template.backends.django"
_OPTIONS = {
    "context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
}
_SETTINGS: dict[str, Any] = {
    "CSRF_USE_SESSIONS": True,
    "DEBUG_PROPAGATE_EXCEPTIONS": True,  # to the server, which writes them to standard error
    "INSTALLED_APPS": [*(f"django.contrib.{each}" for each in _CONTRIB), f"{_LABEL}.django"],
    "MESSAGE_STORAGE": "django.contrib.messages.storage.cookie.CookieStorage",
    "MIDDLEWARE": [
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        f"{__name__}.door",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    "ROOT_URLCONF": __name__,
    "SESSION_COOKIE_NAME": _LABEL,  # cookies know no ports
    "SESSION_COOKIE_SAMESITE": "Strict",
    "SESSION_ENGINE": "django.contrib.sessions.backends.signed_cookies",
    "SESSION_EXPIRE_AT_BROWSER_CLOSE": True,
    "STATIC_URL": "/static/",
    "TEMPLATES": [{"BACKEND": f"{_ENGINE}.DjangoTemplates", "APP_DIRS": True, "OPTIONS": _OPTIONS}],
    "USE_TZ": True,
}

#: Of the pages; made once Django is set up.
urlpatterns: list[URLPattern | URLResolver] = []


def door(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let in who brings the token, take it out of the address, and remember that in a signed cookie."""
    token, user = settings.IDEMPOTENCY_WEB  # type: ignore[misc]  # ours

    def answer(request: Any) -> Any:
        if secrets.compare_digest(request.GET.get("token", "").encode(), token.encode()):
            request.session["known"] = True
            return HttpResponseRedirect("/")
        if not request.session.get("known"):
            why = "Open the address that the command printed."
            return HttpResponse(why, content_type="text/plain", status=403)
        request.user = user
        response = get_response(request)
        response["Content-Security-Policy"] = _POLICY
        return response

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log no addresses: one of them has the token."""


def server_of(
    app: Celery, *, port: int, who: str, allow_operations: bool, allow_results: bool
) -> tuple[WSGIServer, str]:
    """Return a server of the pages, and the address that opens them; raise ``InvalidOption`` if there can be none."""
    if settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ:
        raise InvalidOption("this app belongs to a Django project: use its admin.")
    allowed = {f"{each}_record" for each in OPERATIONS if allow_operations}
    allowed |= {"view_idempotencyrecord", "view_result" if allow_results else ""}
    # All that the pages ask of a user.
    user = SimpleNamespace(
        **dict.fromkeys(("is_active", "is_staff", "is_authenticated"), True),
        **dict.fromkeys(("get_username", "get_short_name"), lambda: who),
        has_perm=lambda name, *_: name.removeprefix(f"{_LABEL}.") in allowed,
        has_module_perms=lambda label: label == _LABEL,
        has_usable_password=lambda: False,
    )
    token, key = secrets.token_urlsafe(24), secrets.token_urlsafe(50)  # a restart logs all out
    hosts = [_LOOPBACK, "localhost"]
    own = {"SECRET_KEY": key, "ALLOWED_HOSTS": hosts, "IDEMPOTENCY_WEB": (token, user)}
    own["TIME_ZONE"] = str(app.timezone)
    settings.configure(**_SETTINGS, **own, **{APP_SETTING: app})
    application = StaticFilesHandler(get_wsgi_application())
    from django.contrib.admin import site

    site.site_header = site.site_title = f"Idempotency of {app.main or 'this app'}"
    site.site_url = None
    # Django's own index reads its log from a database.
    index = RedirectView.as_view(pattern_name=f"admin:{_LABEL}_idempotencyrecord_changelist")
    urlpatterns.extend([path("", index), path("admin/", index), path("admin/", site.urls)])
    try:
        server = make_server(_LOOPBACK, port, application, _Server, _Quiet)
    except OSError as error:
        problem = f"port {port} cannot be served: {error.strerror}. Choose another --port."
        raise InvalidOption(problem) from None
    return server, f"http://{_LOOPBACK}:{server.server_port}/?token={token}"
