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

# ruff: noqa: SLF001  Django has no public names for the stream of a request, and what was read of it

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from io import SEEK_END, BytesIO
from typing import TYPE_CHECKING, BinaryIO, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent
from django.core.handlers.wsgi import LimitedStream
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser, MultiPartParserError

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

#: What Django raises for a request over one of its own limits, at whatever place it is read.
TOO_LARGE: Final = (RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent)

_PIECE: Final = 64 * 1024


def receive(request: HttpRequest, options: HttpOptions, *, parsed: bool = False) -> None:
    """Read the body to its end, before anybody parses it; it stays readable, as often and in the same ways.

    WSGI hands out a body while it arrives, and reports no error when it breaks off: a reader gets less, as if that were
    all, ``amount=1`` of ``amount=1000``. An ASGI application of Django has all of it before the first view.
    ``parsed``: the view has read it already, as far as it wanted to.

    Raises:
        RequestRefused: ``body_incomplete``, ``length_required``, ``body_unreadable`` or ``request_too_large``.
    """
    declared = _declared(request)
    _check_size(declared or 0, options)
    size: int | None
    if (
        declared is None
        and "HTTP_TRANSFER_ENCODING" in request.META
        and "wsgi.input" in request.META
    ):
        if parsed or not request.META.get("wsgi.input_terminated"):
            # To Django there is no body.
            raise RequestRefused("length_required", "Send the body with its Content-Length.")
        size = _receive_chunks(request, options)
    elif hasattr(request, "_body"):
        size = len(request._body)  # read by a middleware, and kept by Django
    elif vars(request)["_read_started"]:
        size = _size_taken(request._stream)
    else:
        size = _size_in_file(request._stream)
        if size is None:
            size = _receive_all(request, request._stream, options)
    if size is not None:
        _check_size(size, options)
        if size < (declared or 0):
            raise _broken_off()


def body_too_large() -> RequestRefused:
    """Return what is said of a request over one of Django's own limits, for which Django itself has a page."""
    return RequestRefused("request_too_large", "It is larger than this service reads.")


def _declared(request: HttpRequest) -> int | None:
    """Return the length that the request declares, ``None`` if it declares none."""
    text = str(request.META.get("CONTENT_LENGTH") or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise RequestRefused("body_unreadable", "Its Content-Length is no number.")
    return int(text)


def _receive_chunks(request: HttpRequest, options: HttpOptions) -> int:
    """Read a chunked body, of which Django sees nothing, from a server that decodes it."""
    if found := getattr(request, "_body", b""):
        return len(found)  # a middleware has done so
    size = _receive_all(request, request.META["wsgi.input"], options)
    request.META["CONTENT_LENGTH"] = str(size)
    vars(request)["_read_started"] = False
    for parsed in ("_body", "_post", "_files"):  # of nothing
        request.__dict__.pop(parsed, None)
    return size


def _receive_all(request: HttpRequest, stream: BinaryIO, options: HttpOptions) -> int:
    """Put the body where it can be read at leisure, a large one into a file; return its size."""
    whole: BinaryIO = BytesIO()
    found = 0
    try:
        while piece := _next_piece(stream):
            found += len(piece)
            _check_size(found, options)
            if isinstance(whole, BytesIO) and found > settings.FILE_UPLOAD_MAX_MEMORY_SIZE:
                before, whole = whole.getvalue(), tempfile.TemporaryFile()  # noqa: SIM115  it outlives this function
                whole.write(before)
            whole.write(piece)
    except BaseException:
        whole.close()
        raise
    if not isinstance(whole, BytesIO):
        vars(request)["close"] = _and_then(request.close, whole.close)
    whole.seek(0)
    request._stream = whole
    return found


def _and_then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _size_in_file(stream: BinaryIO) -> int | None:
    """Return the size of a body that is in a file already, ``None`` if it is still to come."""
    if isinstance(stream, LimitedStream):  # of WSGI: what its seek() raises takes longer
        return None
    try:
        stream.seek(0, SEEK_END)
        size: int = stream.tell()
        stream.seek(0)
    except (AttributeError, OSError, ValueError):
        return None
    return size


def _size_taken(stream: BinaryIO) -> int | None:
    """Return how much there was of a body that others have read; ``None`` if that is not known."""
    if not hasattr(stream, "_pos"):
        return None
    while _next_piece(stream):
        pass
    size: int = stream._pos
    return size


def _next_piece(stream: BinaryIO) -> bytes:
    """Return the next piece of a body; a server that notices that it broke off raises ``OSError``."""
    try:
        piece: bytes = stream.read(_PIECE)
    except OSError as error:
        raise _broken_off() from error
    return piece


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
        RequestRefused: as :func:`receive`.
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
        return form(_DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass")))
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


_DECODER: Final = json.JSONDecoder(parse_float=_number)


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
