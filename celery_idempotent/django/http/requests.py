"""A request of Django's: the options that hold for it, its caller, its body and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import SEEK_END
from math import inf
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import (
    BadRequest,
    RequestDataTooBig,
    TooManyFieldsSent,
    TooManyFilesSent,
)
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, RawPostDataException
from django.http.multipartparser import MultiPartParserError

from celery_idempotent.django.scopes import tenant_scope, user_scope
from celery_idempotent.errors import InvalidKey, InvalidOption
from celery_idempotent.http import requests
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.http.guard import Exchange, Guard, HttpOptions
from celery_idempotent.keys.fingerprints import form, quote
from celery_idempotent.protocol.options import read_options

if TYPE_CHECKING:
    from django.core.files.uploadedfile import UploadedFile

#: The one setting: a dict with any of the options of :class:`.HttpOptions`.
HTTP_SETTING: Final = "IDEMPOTENCY_HTTP"

_PIECE: Final = 64 * 1024
_FORMS: Final = ("application/x-www-form-urlencoded", "multipart/form-data")


def http_options(given: Mapping[str, object] | None = None) -> HttpOptions:
    """Return the options of a view: what is ``given`` wins over the setting."""
    setting = getattr(settings, HTTP_SETTING, None) or {}
    if not isinstance(setting, Mapping):
        raise InvalidOption(f"the setting {HTTP_SETTING} must be a dict of options.")
    return read_options(
        HttpOptions, [(f"the setting {HTTP_SETTING}", setting), ("this view", given or {})]
    )


# -- the caller --------------------------------------------------------------------------------------------------------


def caller_scope(request: HttpRequest, options: HttpOptions) -> object:
    """Return the scope of the caller's keys, ``None`` of an unknown caller."""
    return (options.scope or _scope_of_user)(request)


def session_scope(request: HttpRequest) -> tuple[object, ...]:
    """Return the scope of the user, or of the session of a visitor who is not logged in: ``scope=session_scope``.

    Raises:
        RequestRefused: ``caller_unknown``, if the request did not come with a session that the server keeps.
    """
    if (scope := _scope_of_user(request)) is not None:
        return scope
    session: Any = getattr(request, "session", None)
    key, sent = session and session.session_key, request.COOKIES.get(settings.SESSION_COOKIE_NAME)
    # If this answer is lost, the next attempt does not have the key of a session that begins now. Signed cookies keep
    # none: their "key" is all its content, and changes with it.
    if not key or key != sent or not session.exists(key):
        raise RequestRefused("caller_unknown", "There is no session that identifies the caller.")
    # A digest: who reads records must not be able to take over sessions.
    return (*tenant_scope(), "session", hashlib.sha256(key.encode()).hexdigest())


def _scope_of_user(request: HttpRequest) -> tuple[object, ...] | None:
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return None
    try:
        return user_scope(user)
    except InvalidKey:
        raise RequestRefused("caller_unknown", "The user has no primary key.") from None


# -- the request -------------------------------------------------------------------------------------------------------


class DjangoExchange(Exchange):
    """A request of Django's: ``seen`` is what its view gets, ``request`` Django's own that may be within."""

    over_limits = (RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent)

    def __init__(self, guard: Guard, seen: Any) -> None:
        super().__init__(guard)
        self.seen = seen
        self.request: HttpRequest = getattr(seen, "_request", seen)
        self.environ = self.request.META

    @property
    def settle_seconds(self) -> float:  # type: ignore[override]  # noqa: D102
        return 3.0 if isinstance(self.request, WSGIRequest) else inf

    def given(self) -> tuple[object, ...]:  # noqa: D102
        return (self.seen,)

    def caller(self) -> object:  # noqa: D102
        return caller_scope(self.seen, self.options)

    def target(self) -> tuple[str, str, dict[str, list[str]] | None]:  # noqa: D102
        query = dict(self.request.GET.lists()) if self.environ.get("QUERY_STRING") else None
        return str(self.request.method), self.request.path_info, query

    def receive(self) -> None:
        """Have Django read the body whole. A view that has read some of it already is no obstacle."""
        limit = self.options.max_request_bytes
        if "HTTP_TRANSFER_ENCODING" in self.environ and isinstance(self.request, WSGIRequest):
            # To Django there is no body.
            raise RequestRefused("length_required", "Send the body with its Content-Length.")
        declared = requests.declared_size(self.environ.get("CONTENT_LENGTH"), max_bytes=limit)
        try:
            size = _read(self.request)
        except OSError:  # of a server that notices that it broke off
            size = -1
        if size != declared:
            requests.check_size(size, declared, max_bytes=limit)

    def body_form(self) -> str:
        """Return the form of the body, which stays readable for the view.

        A form that Django parses counts by its fields, and files by their content: its boundary is another one each
        time.
        """
        request = self.request
        if request.method != "POST" or request.content_type not in _FORMS:
            return requests.body_form(self.environ.get("CONTENT_TYPE", ""), request.body)
        try:
            fields, files = request.POST, request.FILES
        except (BadRequest, MultiPartParserError, UnicodeError, LookupError) as error:
            # A charset may be none, or one that Python knows for other ends, as base64.
            raise RequestRefused("body_unreadable", "Its form data is malformed.") from error
        hashed = {name: [_file_form(file) for file in many] for name, many in files.lists()}
        return f"form {form(dict(fields.lists()))} {form(hashed)}"


def _read(request: Any) -> int:
    """Return the size of the body, once Django has read it."""
    try:
        return len(request.body)
    except RawPostDataException:
        pass  # it is a parsed upload, or was read before
    stream = request._stream  # noqa: SLF001  Django has no public name for it, and how far it was read
    if isinstance(request, WSGIRequest):
        while stream.read(_PIECE):
            pass
        return stream._pos  # type: ignore[no-any-return]  # noqa: SLF001
    stream.seek(0, SEEK_END)
    return stream.tell()  # type: ignore[no-any-return]


def _file_form(file: UploadedFile) -> str:
    whole = hashlib.sha256()
    for chunk in file.chunks():
        whole.update(chunk)
    file.seek(0)
    return f"{quote(file.name or '')} {quote(file.content_type or '')} {whole.hexdigest()}"
