"""The body of a request: received whole before anything is claimed, then digested with its method and route.

Who stops halfway has asked for nothing::

    Content-Length: 11    amount=1000      whole: it goes on
    Content-Length: 11    amount=1 ─ ✗     body_incomplete: nothing is claimed, and one euro is not paid

The fingerprint is equal for every way to write the same body::

    {"amount": 1.50, "to": 7}                   one fingerprint: the same members and numbers,
    {"to":7,"amount":1.5}                       in another order, written in another way
    multipart, another boundary each time       one fingerprint: the same fields, and files by their content
    text/plain, one more blank                  another: bytes that mean nothing to us count as they are
"""

# ruff: noqa: SLF001  Django has no public names for the stream of a request, and how far it was read

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import SEEK_END, BytesIO
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent
from django.core.handlers.wsgi import LimitedStream, WSGIRequest
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from celery_idempotent.django.http.options import HttpOptions
from celery_idempotent.http import fingerprints
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.keys.fingerprints import NoFormError, form, quote

if TYPE_CHECKING:
    from django.core.files.uploadedfile import UploadedFile

#: What Django raises for a request over one of its own limits, at whatever place it is read.
TOO_LARGE: Final = (RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent)

_PIECE: Final = 64 * 1024


def receive(request: HttpRequest, options: HttpOptions) -> None:
    """Have Django read the body, and compare its size with the one declared.

    A WSGI server reports no error when a body breaks off: a reader gets less, as if that were all, ``amount=1`` of
    ``amount=1000``. A view that has read it already, as far as it wanted to, is no obstacle.

    Raises:
        RequestRefused: ``body_incomplete``, ``length_required``, ``body_unreadable`` or ``request_too_large``.
        RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent: if it is over one of Django's own limits.
    """
    declared = _declared(request)
    _check_size(declared, options)
    if "HTTP_TRANSFER_ENCODING" in request.META and isinstance(request, WSGIRequest):
        # To Django there is no body.
        raise RequestRefused("length_required", "Send the body with its Content-Length.")
    malformed: MultiPartParserError | None = None
    try:
        if not vars(request)["_read_started"]:
            try:
                _ = request.POST if _is_large_upload(request, declared) else request.body
            except MultiPartParserError as error:
                malformed = error  # perhaps because it broke off
        size = len(request._body) if hasattr(request, "_body") else _size_taken(request._stream)
    except OSError as error:  # a server that notices that it broke off
        raise _broken_off() from error
    _check_size(size, options)
    if size < declared:
        raise _broken_off()
    if malformed is not None:
        raise _malformed_form() from malformed


def body_too_large() -> RequestRefused:
    """Return what is said of a request over one of Django's own limits, for which Django itself has a page."""
    return RequestRefused("request_too_large", "It is larger than this service reads.")


def _malformed_form() -> RequestRefused:
    return RequestRefused("body_unreadable", "The form in it is malformed.")


def _declared(request: HttpRequest) -> int:
    """Return the length that the request declares, 0 if it declares none."""
    text = str(request.META.get("CONTENT_LENGTH") or "0").strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise RequestRefused("body_unreadable", "Its Content-Length is no number.")
    return int(text)


def _size_taken(stream: Any) -> int:
    """Return how much there was of a body that was parsed or read piece by piece."""
    limited = isinstance(stream, LimitedStream)  # of WSGI
    if limited:
        while stream.read(_PIECE):
            pass
    else:
        stream.seek(0, SEEK_END)
    size: int = stream._pos if limited else stream.tell()
    return size


def _broken_off() -> RequestRefused:
    return RequestRefused(
        "body_incomplete",
        "Less of it arrived than the request declares. Send the same request with the same key again.",
    )


def _check_size(size: int, options: HttpOptions) -> None:
    if size > options.max_request_bytes:
        raise RequestRefused(
            "request_too_large",
            f"An idempotent request has up to {options.max_request_bytes} bytes.",
        )


_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"


def request_fingerprint(request: HttpRequest, seen: HttpRequest, options: HttpOptions) -> bytes:
    """Return the fingerprint of ``request``; ``seen`` is what the view gets (Django REST framework wraps it).

    The body stays readable for the view.

    Raises:
        RequestRefused: ``body_unreadable``.
        RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent: if it is over one of Django's own limits.
    """
    if options.fingerprint is not None:
        value = options.fingerprint(seen)
        try:
            body = f"own {form(value)}"
        except NoFormError as refused:
            raise TypeError(f"The fingerprint of a request cannot be used: {refused}.") from None
    else:
        body = _body(request)
    has_query = request.META.get("QUERY_STRING") or "GET" in vars(request)
    query = dict(request.GET.lists()) if has_query else None
    return fingerprints.request_fingerprint(str(request.method), request.path_info, query, body)


def _body(request: HttpRequest) -> str:
    content_type = (request.content_type or "").lower()
    try:
        if content_type in (_FORM, _MULTIPART):
            _check_charset(request)
        if content_type == _MULTIPART:
            return _multipart(request)
        raw = request.body
        if content_type == _FORM:
            data = QueryDict(raw, encoding=request.encoding or "utf-8")
            return f"form {_form_fields(data)}"
    except (MultiPartParserError, UnicodeError) as error:
        raise _malformed_form() from error
    return fingerprints.body_form(content_type, raw)


def _check_charset(request: HttpRequest) -> None:
    """Python knows ``base64`` by name as well, and Django believes the client."""
    try:
        "a".encode(request.encoding or "utf-8")
    except (LookupError, UnicodeError) as error:
        raise RequestRefused("body_unreadable", "Its charset is none.") from error


def _form_fields(data: QueryDict) -> str:
    return form(dict(data.lists()))


def _multipart(request: HttpRequest) -> str:
    """Return the form of fields and files; the boundary between them is a new one with each attempt."""
    data: QueryDict
    if request.method == "POST":
        data, files = request.POST, request.FILES
    else:
        # Django parses forms of POST alone.
        upload = request.upload_handlers
        parser = MultiPartParser(request.META, BytesIO(request.body), upload, request.encoding)
        data, files = parser.parse()
    hashed: Mapping[str, list[str]] = {
        name: [_file(file) for file in many] for name, many in files.lists()
    }
    return f"multipart {_form_fields(data)} {form(hashed)}"


def _file(file: UploadedFile) -> str:
    whole = hashlib.sha256()
    for chunk in file.chunks():
        whole.update(chunk)
    file.seek(0)
    return f"{quote(file.name or '')} {quote(file.content_type or '')} {whole.hexdigest()}"


def _is_large_upload(request: HttpRequest, size: int) -> bool:
    """Is this a form that Django parses piece by piece, for it is too large for ``request.body``?"""
    limit: int | None = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    multipart = request.method == "POST" and (request.content_type or "").lower() == _MULTIPART
    return multipart and limit is not None and size > limit
