"""What a request asks for, digested: its method, its route and its body, equal for every way to write the same body."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Final

from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from celery_idempotent.django.http.bodies import receive
from celery_idempotent.django.http.options import HttpOptions
from celery_idempotent.django.http.problems import RequestRefused
from celery_idempotent.identity.fingerprints import (
    NoFormError,
    Written,
    fingerprint_of,
    form,
    quote,
)

if TYPE_CHECKING:
    from django.core.files.uploadedfile import UploadedFile

#: A float distinguishes numbers of so many digits, times ten to the power of up to so much.
_FLOAT_DIGITS, _FLOAT_POWER = sys.float_info.dig, 280

_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
#: The form of a query string without fields.
_NO_QUERY = form({})


def read_body(request: HttpRequest, options: HttpOptions) -> None:
    """Read the body, before anybody parses it: what Django REST framework takes from the stream is gone.

    Not a form of POST: what was parsed of it is shared. Nor where it does not count.

    Raises:
        RequestRefused: as :func:`~celery_idempotent.django.http.bodies.receive`.
        RequestDataTooBig: if it is over Django's own limit.
    """
    receive(request, options)
    if options.fingerprint is None and not _is_upload(request):
        request.body  # noqa: B018  kept by Django


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
    query = form(dict(request.GET.lists())) if has_query else _NO_QUERY
    parts = (str(request.method), request.path_info)
    return fingerprint_of(" ".join([*map(quote, parts), query, body]))


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
        raise RequestRefused("body_unreadable", "The form in it is malformed.") from error
    if content_type == "application/json" or content_type.endswith("+json"):
        canonical = _json(raw)
        if canonical is not None:
            return f"json {canonical}"
    return f"raw {quote(content_type)} {hashlib.sha256(raw).hexdigest()}"


def _check_charset(request: HttpRequest) -> None:
    """Python knows ``base64`` by name as well, and Django believes the client."""
    try:
        "a".encode(request.encoding or "utf-8")
    except (LookupError, UnicodeError) as error:
        raise RequestRefused("body_unreadable", "Its charset is none.") from error


def _json(raw: bytes) -> str | None:
    """Return the canonical form of a JSON body; ``None`` if it is none, or too deep for one: then its bytes count."""
    try:
        return form(_JSON.decode(raw.decode(json.detect_encoding(raw), "surrogatepass")))
    except (ValueError, RecursionError, NoFormError):
        return None


def _number(text: str) -> float | Written:
    """Return a JSON number in a form that differs from that of every other: a float, unless it has more digits.

    Numbers of up to 15 digits are as many floats. ``0.1``, ``0.10`` and ``1e-1`` are one number.
    """
    if len(text) <= _FLOAT_DIGITS + 1 and "e" not in text and "E" not in text:
        return float(text)
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    padded = (whole + fraction).lstrip("0")
    digits = padded.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(padded) - len(digits)
    if not digits or (len(digits) <= _FLOAT_DIGITS and abs(power) <= _FLOAT_POWER):
        return float(text)
    return Written(f"{'-' if text.startswith('-') else ''}{digits}e{power}")


_JSON: Final = json.JSONDecoder(parse_float=_number)


def _form_fields(data: QueryDict) -> str:
    return form(dict(data.lists()))


def _multipart(request: HttpRequest) -> str:
    """Return the form of fields and files; the boundary between them is a new one with each attempt."""
    data: QueryDict
    if _is_upload(request):
        data, files = request.POST, request.FILES
    else:
        # What is read here as a whole stays readable for the view.
        raw = request.body
        upload = request.upload_handlers
        parser = MultiPartParser(request.META, BytesIO(raw), upload, request.encoding)
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


def _is_upload(request: HttpRequest) -> bool:
    """Is this a form with files that Django parses by itself? It does so for POST only."""
    multipart = (request.content_type or "").lower() == _MULTIPART
    return multipart and request.method == "POST" and not hasattr(request, "_body")
