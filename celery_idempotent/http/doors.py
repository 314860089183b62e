"""What the middleware of :mod:`celery_idempotent.asgi` and of :mod:`celery_idempotent.wsgi` share.

A request is the scope of ASGI or the environ of WSGI. Its body is received whole, its response is collected::

    key ─ caller ─ body ─ claim ─▶ the application ─┬─ complete ──────────────▶ settle ─ send
                                                    └─ over the limit ─▶ pass on ─ settle ─ send the last part
"""

from __future__ import annotations

import hashlib
import http
import json
import re
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

from celery import Celery

from celery_idempotent.errors import InvalidOption
from celery_idempotent.http import requests
from celery_idempotent.http.answers import Answer, Headers, RequestRefused, pack_response
from celery_idempotent.http.guard import Guard, RequestRun
from celery_idempotent.http.options import HTTP_NAMESPACE, METHODS, HttpOptions, RequestFunction
from celery_idempotent.keys.arguments import type_name
from celery_idempotent.keys.fingerprints import NoFormError, form
from celery_idempotent.keys.stamp import MAX_CHARS, is_text
from celery_idempotent.protocol.options import accept_if, flag, option, read_options
from celery_idempotent.stores import Store, get_store, open_store

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.protocol.run import Body
    from celery_idempotent.records import Identity, Stored

#: The scope of ASGI, or the environ of WSGI.
Request = MutableMapping[str, Any]

KEY_HEADER: Final = "Idempotency-Key"

# -- options -----------------------------------------------------------------------------------------------------------


def _strings(value: object) -> tuple[str, ...]:
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else ()
    if not found or not all(isinstance(each, str) for each in found):
        raise ValueError("must be a sequence of strings")
    return found


def _methods(value: object) -> frozenset[str]:
    found = frozenset(map(str.upper, _strings(value)))
    if found - METHODS:
        raise ValueError(f"must be some of {', '.join(sorted(METHODS))}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorOptions(HttpOptions):
    """The options of the middleware: those of views but ``atomic``, and its own."""

    # May be a coroutine function under ASGI.
    scope: RequestFunction = option(
        lambda _: None, accept_if(callable, "must be a function of the request")
    )
    atomic: bool = option(
        False,
        accept_if(
            lambda value: value is False,
            "needs transactions of Django: use @idempotent_view(atomic=True)",
        ),
    )
    methods: frozenset[str] = option(frozenset(("POST", "PATCH")), _methods)
    paths: tuple[str, ...] = option(("/",), _strings)
    release_large: bool = option(False, flag)
    name: str = option(
        HTTP_NAMESPACE, accept_if(is_text, f"must be a string of 1 to {MAX_CHARS} characters")
    )


# -- callers -----------------------------------------------------------------------------------------------------------


def read_header(request: Request, name: str, separator: str = ",") -> str | None:
    """Return the value of a header; values of one that was sent twice are joined."""
    if "headers" not in request:  # of WSGI, whose server has joined them
        name = name.upper().replace("-", "_")
        return request.get(name if name.startswith("CONTENT_") else f"HTTP_{name}")
    wanted = name.lower().encode()
    found = [value.decode("latin-1") for key, value in request["headers"] if key == wanted]
    return separator.join(found) if found else None


def bearer_scope(request: Request) -> tuple[str, str] | None:
    """Return a digest of the bearer token, as scope: a new token is another caller. ``None`` without a token."""
    scheme, _, token = (read_header(request, "Authorization") or "").strip().partition(" ")
    return _secret("bearer", token.strip()) if scheme.lower() == "bearer" else None


def session_scope(cookie: str) -> RequestFunction:
    """Return the scope function of a session whose id is in ``cookie``: ``scope=session_scope("sessionid")``.

    The scope is a digest of the id. It is for sessions that the server keeps: a signed cookie with the session's
    content changes with it. Without the cookie, or with two of this name, there is no caller.
    """

    def scope(request: Request) -> tuple[str, str] | None:
        cookies = (read_header(request, "Cookie", ";") or "").split(";")
        pairs = (each.strip().partition("=") for each in cookies)
        found = [value.strip() for name, _, value in pairs if name == cookie]
        return _secret("session", found[0]) if len(found) == 1 else None

    return scope


def _secret(kind: str, text: str) -> tuple[str, str] | None:
    """Return a scope without the secret: who reads records must not be able to act as the caller."""
    return (kind, hashlib.sha256(text.encode()).hexdigest()) if text else None


# -- responses ---------------------------------------------------------------------------------------------------------


class Response:
    """The response of the application; ``parts`` are the parts of its body that are not sent yet."""

    status, reason, size = 0, "", 0

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.headers: Headers = []
        self.parts: list[bytes] = []

    def start(self, status: int, headers: Headers, reason: str = "") -> None:
        """Set the status and the headers."""
        self.status, self.headers, self.reason = status, headers, reason

    def add(self, part: bytes) -> None:
        """Add a part of the body."""
        if not self.status:
            raise RuntimeError("the application sent a body before the status of its response")
        self.parts.append(part)
        self.size += len(part)

    @property
    def is_large(self) -> bool:
        """Is it too large to be stored?"""
        return self.size > self.max_bytes

    def take(self) -> bytes:
        """Return what is not sent yet of the body, and forget it."""
        taken = b"".join(self.parts)
        self.parts.clear()
        return taken


def _pack(response: Response, *, name: str) -> Stored:
    why = f"it has more than {response.max_bytes} bytes" if response.is_large else ""
    body = b"" if why else b"".join(response.parts)
    answer = Answer(response.status, response.headers, body, response.reason)
    return pack_response(answer, max_bytes=response.max_bytes, name=name, why=why)


def response_of(answer: Answer) -> Response:
    """Return an answer as a response."""
    headers, body = list(answer.headers), answer.body
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if answer.status >= 200 and answer.status not in (204, 304):
        headers.append(("Content-Length", str(len(body))))
    response = Response(len(body))
    response.start(answer.status, headers, answer.reason or http.HTTPStatus(answer.status).phrase)
    response.add(body)
    return response


# -- requests ----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """What a request is about."""

    method: str
    path: str
    query: str


class Door:
    """Guards the requests of an application: what does not depend on how a server calls it."""

    def __init__(
        self, app: object, store: Store | str | AnyCelery, given: dict[str, object]
    ) -> None:
        where = "IdempotencyMiddleware()"
        self.options = options = read_options(DoorOptions, [(where, given)])
        if isinstance(store, str):
            store = open_store(store)  # connects with its first verb
        if isinstance(store, Store):
            opened = store
            open_it: Callable[[], Store] = lambda: opened  # noqa: E731
        elif isinstance(store, Celery):
            open_it = partial(get_store, store)
        else:
            raise InvalidOption(
                f"store of {where} must be a URL, a store or a Celery app, not {type_name(store)}."
            )
        self.guard = Guard(options.name, app, options, open_it, partial(_pack, name=options.name))

    def guards(self, request: Request, target: Target) -> bool:
        """Does this request need a key, or have one?"""
        options = self.options
        is_meant = target.method in options.methods and target.path.startswith(options.paths)
        return is_meant and (options.required or read_header(request, KEY_HEADER) is not None)

    def key(self, request: Request) -> str:
        """Return the key of a request that :meth:`guards`; it may be refused."""
        key = requests.read_key(read_header(request, KEY_HEADER), required=True)
        assert key is not None, "it is required"
        return key

    def identity(self, scope: object, key: str) -> Identity:
        """Return the identity of a key of a caller; a caller without a scope is refused."""
        return requests.http_identity(self.options.name, scope, key)

    def answer(
        self, request: Request, target: Target, identity: Identity, body: bytes, view: Body
    ) -> object:
        """Return what ``view`` returns, which is :meth:`kept`, or an answer in its place; it may be refused."""
        fingerprint = self._fingerprint(request, target, body)
        run = RequestRun(self.guard, identity, fingerprint, partial(self._authorize, request))
        return self.guard.answer(run, view)

    def kept(self, response: Response) -> Response:
        """Return the response of the application if it is one to repeat; any other leaves as an exception."""
        released = response.is_large and self.options.release_large
        return self.guard.kept(response, response.status, is_kept=not released)

    def refusal(self, refused: RequestRefused) -> Answer:
        """Return the answer to a request that is not carried out."""
        return refused.answer(self.options.docs_url)

    def _authorize(self, request: Request) -> None:
        authorize = self.options.authorize
        if authorize is not None and authorize(request) is not True:
            raise RequestRefused("replay_refused", "You may not see the response any more.")

    def _fingerprint(self, request: Request, target: Target, body: bytes) -> bytes:
        own = self.options.fingerprint
        try:
            text = f"own {form(own(request, body))}" if own else _body_form(request, body)
        except NoFormError as refused:
            raise TypeError(f"The fingerprint of a request cannot be used: {refused}.") from None
        query = _fields(target.query) if target.query else None
        return requests.request_fingerprint(target.method, target.path, query, text)


_BOUNDARY: Final = re.compile(r'; *boundary=(?:"([^"]+)"|([^";, ]+))', re.IGNORECASE)


def _fields(text: str) -> dict[str, list[str]]:
    """Return the fields of a query or form; each character of ``text``, and of the fields, is a byte."""
    return parse_qs(text, keep_blank_values=True, encoding="latin-1")


def _body_form(request: Request, body: bytes) -> str:
    """Return the form of a body; a form counts by its fields, and one in parts without its boundary."""
    content_type = read_header(request, "Content-Type") or ""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        return f"form {form(_fields(body.decode('latin-1')))}"
    if kind == "multipart/form-data" and (found := _BOUNDARY.search(content_type)):
        boundary = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        _, *parts = (b"\r\n" + body).split(boundary)
        if parts and parts[-1].startswith(b"--"):  # else it is not whole
            # By their headers: fields of one name stay in their order.
            parts = sorted(parts[:-1], key=lambda part: part.partition(b"\r\n\r\n")[0])
            return f"multipart {form([hashlib.sha256(part).hexdigest() for part in parts])}"
    return requests.body_form(kind, body)
