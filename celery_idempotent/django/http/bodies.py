"""The body of a request, received whole before anything is claimed: who stops halfway has asked for nothing."""

# ruff: noqa: SLF001  Django has no public names for the stream of a request, and what was read of it

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from io import SEEK_END, BytesIO
from typing import TYPE_CHECKING, BinaryIO, Final

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent, TooManyFilesSent
from django.core.handlers.wsgi import LimitedStream

from celery_idempotent.django.http.problems import RequestRefused

if TYPE_CHECKING:
    from django.http import HttpRequest

    from celery_idempotent.django.http.options import HttpOptions

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
    with ExitStack() as stack:
        while piece := _next_piece(stream):
            size = whole.tell() + len(piece)
            _check_size(size, options)
            if size > settings.FILE_UPLOAD_MAX_MEMORY_SIZE and isinstance(whole, BytesIO):
                file = stack.enter_context(tempfile.TemporaryFile())
                file.write(whole.getvalue())
                whole = file
            whole.write(piece)
        if not isinstance(whole, BytesIO):
            vars(request)["close"] = _and_then(request.close, stack.pop_all().close)
    found: int = whole.tell()
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
