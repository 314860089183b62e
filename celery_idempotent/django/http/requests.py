"""What is read of a request of Django's: the options that hold for it, its caller, its body and its fingerprint.

The body is received whole before anything is claimed. A client that stops halfway has asked for nothing::

    Content-Length: 11    amount=1000      whole: it goes on
    Content-Length: 11    amount=1 ─ ✗     body_incomplete: nothing is claimed, and one euro is not paid

The fingerprint is equal for every way to write the same body::

    {"amount": 1.50, "to": 7}                   one fingerprint: the same members and numbers,
    {"to":7,"amount":1.5}                       in another order, written in another way
    multipart, another boundary each time       one fingerprint: the same fields, and files by their content
    text/plain, one more blank                  another: bytes that mean nothing to us count as they are
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import SEEK_END, BytesIO
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, QueryDict, RawPostDataException
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from celery_idempotent.django.scopes import tenant_scope, user_scope
from celery_idempotent.errors import InvalidKey, InvalidOption
from celery_idempotent.http import fingerprints
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.http.options import HttpOptions
from celery_idempotent.keys.fingerprints import NoFormError, form, quote
from celery_idempotent.protocol.options import read_options

if TYPE_CHECKING:
    from django.core.files.uploadedfile import UploadedFile

#: The one setting: a dict with any of the options of :class:`.HttpOptions`.
HTTP_SETTING: Final = "IDEMPOTENCY_HTTP"

#: Where a request has its ``Idempotency-Key``.
KEY_META: Final = "HTTP_IDEMPOTENCY_KEY"

#: What Django raises for a request over one of its own limits, at whatever place it is read.
TOO_LARGE: Final = (RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent)

_PIECE: Final = 64 * 1024
_FORM, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"


def http_options(given: Mapping[str, object] | None = None) -> HttpOptions:
    """Return the options of a view: what is ``given`` wins over the setting.

    Raises:
        InvalidOption: for an unknown name or a bad value, saying what is allowed.
    """
    setting = getattr(settings, HTTP_SETTING, None) or {}
    if not isinstance(setting, Mapping):
        raise InvalidOption(f"the setting {HTTP_SETTING} must be a dict of options.")
    return read_options(
        HttpOptions, [(f"the setting {HTTP_SETTING}", setting), ("this view", given or {})]
    )


# -- the caller --------------------------------------------------------------------------------------------------------


def caller_scope(request: HttpRequest, options: HttpOptions) -> object:
    """Return the scope of the caller's keys: no caller sees a record of another.

    Raises:
        RequestRefused: ``caller_unknown``, if the request has no known caller. All callers in one scope would
            hand one visitor the answers of another.
    """
    scope = (options.scope or _scope_of_user)(request)
    if scope is None:
        own = options.scope is not None
        problem = (
            "The request does not say who sends it." if own else "Log in, or send credentials."
        )
        raise RequestRefused("caller_unknown", problem)
    return scope


def session_scope(request: HttpRequest) -> tuple[object, ...]:
    """Return the scope of the user, or of the session of a visitor who is not logged in: ``scope=session_scope``.

    Raises:
        RequestRefused: ``caller_unknown``, without a session that the server keeps.
    """
    if (scope := _scope_of_user(request)) is not None:
        return scope
    session: Any = getattr(request, "session", None)
    if session is not None and not session.session_key:
        session.save()  # gives it its key
    key = session and session.session_key
    # Signed cookies keep no session: their "key" is all its content, and changes with it.
    if not key or not session.exists(key):
        raise RequestRefused("caller_unknown", "There is no session to know the caller by.")
    # A digest: who reads records must not be able to take over sessions.
    return (*tenant_scope(), "session", hashlib.sha256(key.encode()).hexdigest())


def _scope_of_user(request: HttpRequest) -> tuple[object, ...] | None:
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return None
    try:
        return user_scope(user)
    except InvalidKey:
        raise RequestRefused("caller_unknown", "The user has no identity of its own.") from None


# -- the body ----------------------------------------------------------------------------------------------------------


def receive(request: HttpRequest, options: HttpOptions) -> None:
    """Have Django read the body, and compare its size with the one declared.

    A WSGI server reports no error when a body breaks off: a reader gets less, as if that were all, ``amount=1`` of
    ``amount=1000``. A view that has read it already, as far as it wanted to, is no obstacle.

    Raises:
        RequestRefused: ``body_incomplete``, ``length_required``, ``body_unreadable`` or ``request_too_large``.
        RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent: if it is over one of Django's own limits.
    """
    text = str(request.META.get("CONTENT_LENGTH") or "0").strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise RequestRefused("body_unreadable", "Its Content-Length is no number.")
    size = declared = int(text)
    if "HTTP_TRANSFER_ENCODING" in request.META and isinstance(request, WSGIRequest):
        # To Django there is no body.
        raise RequestRefused("length_required", "Send the body with its Content-Length.")
    try:
        size = declared if declared > options.max_request_bytes else _read(request, declared)
    except OSError:  # a server that notices that it broke off
        size = -1
    if size > options.max_request_bytes:
        raise RequestRefused(
            "request_too_large",
            f"An idempotent request has up to {options.max_request_bytes} bytes.",
        )
    if size < declared:
        raise RequestRefused(
            "body_incomplete",
            "Less of it arrived than the request declares. Send the same request with the same key again.",
        )


def _read(request: Any, declared: int) -> int:
    """Have Django read the body, as a form piece by piece if it is too large for ``request.body``; return its size."""
    limit, malformed = settings.DATA_UPLOAD_MAX_MEMORY_SIZE, None
    try:
        if _is_parsed_upload(request) and declared > (limit or declared):
            _ = request.POST
        return len(request.body)
    except RawPostDataException:
        pass  # it is parsed, or was read before
    except MultiPartParserError as error:
        malformed = error  # perhaps because it broke off
    stream = request._stream  # noqa: SLF001  Django has no public name for it, and how far it was read
    if isinstance(request, WSGIRequest):
        while stream.read(_PIECE):
            pass
        size: int = stream._pos  # noqa: SLF001
    else:
        stream.seek(0, SEEK_END)
        size = stream.tell()
    if malformed is not None and size >= declared:
        raise _malformed_form() from malformed
    return size


def _is_parsed_upload(request: HttpRequest) -> bool:
    """Does Django parse the fields and files in the body? Of a POST alone."""
    return request.method == "POST" and (request.content_type or "").lower() == _MULTIPART


def _malformed_form() -> RequestRefused:
    return RequestRefused("body_unreadable", "The form in it is malformed.")


# -- the fingerprint ---------------------------------------------------------------------------------------------------


def request_fingerprint(request: HttpRequest, seen: HttpRequest, options: HttpOptions) -> bytes:
    """Return the fingerprint of ``request``; ``seen`` is what the view gets (Django REST framework wraps it).

    The body stays readable for the view.

    Raises:
        RequestRefused: ``body_unreadable``.
        RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent: if it is over one of Django's own limits.
    """
    if options.fingerprint is None:
        body = _body_form(request)
    else:
        try:
            body = f"own {form(options.fingerprint(seen))}"
        except NoFormError as refused:
            raise TypeError(f"The fingerprint of a request cannot be used: {refused}.") from None
    query = dict(request.GET.lists()) if request.META.get("QUERY_STRING") else None
    return fingerprints.request_fingerprint(str(request.method), request.path_info, query, body)


def _body_form(request: HttpRequest) -> str:
    content_type = (request.content_type or "").lower()
    if content_type not in (_FORM, _MULTIPART):
        return fingerprints.body_form(content_type, request.body)
    try:
        # Python knows base64 by name as well, and Django believes the client.
        "a".encode(request.encoding or "utf-8")
    except (LookupError, UnicodeError) as error:
        raise RequestRefused("body_unreadable", "Its charset is none.") from error
    try:
        if content_type == _FORM:
            fields: QueryDict = QueryDict(request.body, encoding=request.encoding or "utf-8")
            return f"form {form(dict(fields.lists()))}"
        if _is_parsed_upload(request):
            fields, files = request.POST, request.FILES
        else:
            body, handlers = BytesIO(request.body), request.upload_handlers
            fields, files = MultiPartParser(request.META, body, handlers, request.encoding).parse()
    except (MultiPartParserError, UnicodeError) as error:
        raise _malformed_form() from error
    hashed = {name: [_file_form(file) for file in many] for name, many in files.lists()}
    return f"multipart {form(dict(fields.lists()))} {form(hashed)}"


def _file_form(file: UploadedFile) -> str:
    whole = hashlib.sha256()
    for chunk in file.chunks():
        whole.update(chunk)
    file.seek(0)
    return f"{quote(file.name or '')} {quote(file.content_type or '')} {whole.hexdigest()}"
