"""How a view is guarded: the arguments of its decorator over the setting ``IDEMPOTENCY_HTTP``, checked and frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpResponse
from django.utils.module_loading import import_string

from celery_idempotent.errors import InvalidOption
from celery_idempotent.identity.identified import MAX_CHARS
from celery_idempotent.protocol.policy import Mode, Policy, StoreErrorPolicy
from celery_idempotent.settings import milliseconds

if TYPE_CHECKING:
    from django.http import HttpResponseBase

__all__ = [
    "KEPT_ATTRIBUTES",
    "KEPT_HEADERS",
    "NEVER_KEPT",
    "SETTING",
    "Check",
    "HttpOptions",
    "read_options",
]

#: The one setting: a dict with any of the options of :class:`HttpOptions`.
SETTING: Final = "IDEMPOTENCY_HTTP"

#: Headers of a response that are kept for its replays; ``headers`` adds to them.
KEPT_HEADERS: Final = (
    "Cache-Control",
    "Content-Disposition",
    "Content-Encoding",
    "Content-Language",
    "Content-Location",
    "Content-Type",
    "ETag",
    "Expires",
    "Last-Modified",
    "Link",
    "Location",
    "Pragma",
    "Retry-After",
    "Vary",
    # A replay is as safe as its first answer.
    "Clear-Site-Data",
    "Content-Security-Policy",
    "Content-Security-Policy-Report-Only",
    "Cross-Origin-Embedder-Policy",
    "Cross-Origin-Embedder-Policy-Report-Only",
    "Cross-Origin-Opener-Policy",
    "Cross-Origin-Opener-Policy-Report-Only",
    "Cross-Origin-Resource-Policy",
    "Origin-Agent-Cluster",
    "Permissions-Policy",
    "Referrer-Policy",
    "Report-To",
    "Reporting-Endpoints",
    "Strict-Transport-Security",
    "WWW-Authenticate",
    "X-Content-Type-Options",
    "X-Download-Options",
    "X-Frame-Options",
    "X-Permitted-Cross-Domain-Policies",
    "X-Robots-Tag",
    "X-XSS-Protection",
)
#: What decorators leave on a response for the middleware outside: Django's own, and django-csp's. ``attributes`` adds.
KEPT_ATTRIBUTES: Final = (
    "xframe_options_exempt",
    "_csp_config",
    "_csp_ro_config",
    "_csp_config_ro",
    "_csp_exempt",
    "_csp_exempt_ro",
    "_csp_replace",
    "_csp_replace_ro",
    "_csp_update",
    "_csp_update_ro",
)
#: Headers that belong to one answer, or to one connection.
NEVER_KEPT: Final = frozenset(
    ("connection", "content-length", "date", "set-cookie", "transfer-encoding")
)

#: Runs before the key is looked up: an answer that it returns is sent, and not stored.
Check = Callable[..., "HttpResponseBase | None"]

Anonymous = Literal["refuse", "session"]
OnConflict = Literal["refuse", "wait"]
OnPending = Literal["accept", "refuse"]
ShowErrors = Literal["none", "permanent", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What ``idempotent_view``, ``keyed_view`` and ``IDEMPOTENCY_HTTP`` take. Times are seconds or timedeltas."""

    scope: Callable[[Any], object] | None = None
    anonymous: Anonymous = "refuse"
    required: bool = True
    strict: bool = False
    namespace: str = "http"
    methods: tuple[str, ...] = ("POST", "PUT", "PATCH", "DELETE")
    checks: tuple[Check, ...] = ()
    authorize: Callable[..., object] | None = None
    fingerprint: Callable[[Any], object] | None = None
    lease: Any = 30
    retention: Any = 24 * 3600
    max_crashes: int = 3
    on_conflict: OnConflict = "refuse"
    wait: Any = 10
    on_pending: OnPending = "accept"
    on_store_error: StoreErrorPolicy = "closed"
    retry_after: float = 1
    headers: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    unstored: tuple[int, ...] = (400, 401, 403, 405, 406, 408, 411, 413, 415, 425, 429)
    max_request_bytes: int = 10 * 1024 * 1024
    max_response_bytes: int = 1024 * 1024
    show_errors: ShowErrors = "permanent"
    docs_url: str | None = None
    app: str | None = None
    namespaces: tuple[str, ...] | None = None
    atomic: bool = False
    mode: Mode = "enforce"

    @property
    def policy(self) -> Policy:
        """The policy of the runner that guards the view."""
        return Policy(
            lease_ms=milliseconds(self.lease),
            retention_ms=milliseconds(self.retention),
            on_conflict="wait" if self.on_conflict == "wait" else "raise",
            wait_ms=milliseconds(self.wait),
            max_crashes=self.max_crashes,
            max_result_bytes=self.max_response_bytes,
            on_store_error=self.on_store_error,
            atomic=self.atomic,
            mode=self.mode,
        )

    def shows(self, namespace: str) -> bool:
        """Does the status resource tell of keys of this namespace?"""
        return self.namespaces is None or namespace in self.namespaces

    def is_stored(self, status: int) -> bool:
        """Is an answer with this status one to repeat, rather than one to try again?"""
        return status < 500 and status not in self.unstored


def read_options(given: Mapping[str, Any] | None = None) -> HttpOptions:
    """Return the options of a view: what is ``given`` wins over the setting.

    Raises:
        InvalidOption: for an unknown name or a bad value, saying what is allowed.
    """
    values: dict[str, Any] = {}
    found = getattr(settings, SETTING, None) or {}
    if not isinstance(found, Mapping):
        raise InvalidOption(f"the setting {SETTING} is a dict of options.")
    for source, where in ((found, f"the setting {SETTING}"), (given or {}, "this view")):
        for name, value in source.items():
            if name not in _KNOWN:
                raise InvalidOption(_unknown(str(name), where))
            try:
                values[name] = _checked(name, value)
            except ValueError as error:
                raise InvalidOption(f"{name} of {where} {error}.") from None
    options = HttpOptions(**values)
    if options.atomic and options.on_store_error == "open":
        raise InvalidOption(
            'atomic excludes on_store_error="open": there is no transaction when there is no store.'
        )
    return options


def _unknown(name: str, where: str) -> str:
    close = get_close_matches(name, _KNOWN, n=1)
    hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(sorted(_KNOWN)) + "."
    return f"{name} of {where} is not an option: {hint}"


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"is one of {', '.join(map(repr, _CHOICES[name]))}")
    elif name in ("atomic", "required", "strict"):
        if not isinstance(value, bool):
            raise ValueError("is True or False")
    elif name in ("lease", "retention", "wait"):
        if milliseconds(value) < (100 if name == "lease" else 0):
            raise ValueError("takes at least 0.1 seconds")
    elif name in ("max_crashes", "max_request_bytes", "max_response_bytes", "retry_after"):
        number = isinstance(value, int) or (name == "retry_after" and isinstance(value, float))
        if not number or isinstance(value, bool) or value < 0:
            raise ValueError("takes a number from 0")
    elif name == "namespace":
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_CHARS:
            raise ValueError(f"is 1 to {MAX_CHARS} printable characters")
    elif name in _SEQUENCES and not (name == "namespaces" and value is None):
        return _sequence(name, value)
    elif name in ("authorize", "scope", "fingerprint"):
        value = import_string(value) if isinstance(value, str) else value
        if value is not None and (not callable(value) or iscoroutinefunction(value)):
            raise ValueError("takes a function of the request, no coroutine, or its dotted path")
    elif value is not None and not isinstance(value, str):
        raise ValueError("takes a text")
    return value


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError("takes a sequence")
    items = tuple(value)
    if name == "checks":
        items = tuple(import_string(item) if isinstance(item, str) else item for item in items)
    if not all(_SEQUENCES[name](item) for item in items):
        raise ValueError(_ALLOWED[name])
    return tuple(item.upper() for item in items) if name == "methods" else items


_KNOWN: Final = {field.name for field in fields(HttpOptions)}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "anonymous": get_args(Anonymous),
    "on_conflict": get_args(OnConflict),
    "on_pending": get_args(OnPending),
    "on_store_error": get_args(StoreErrorPolicy),
    "show_errors": get_args(ShowErrors),
    "mode": get_args(Mode),
}
_SAFE: Final = ("GET", "HEAD", "OPTIONS", "TRACE")
_SEQUENCES: Final[dict[str, Callable[[Any], bool]]] = {
    "methods": lambda item: isinstance(item, str) and item.upper() not in _SAFE,
    "checks": lambda item: callable(item) and not iscoroutinefunction(item),
    "namespaces": lambda item: isinstance(item, str),
    "headers": lambda item: isinstance(item, str) and item.lower() not in NEVER_KEPT,
    "attributes": lambda item: (
        isinstance(item, str) and item.isidentifier() and not hasattr(HttpResponse(), item)
    ),
    "unstored": lambda item: isinstance(item, int) and 100 <= item < 500,
}
_ALLOWED: Final = {
    "methods": f"takes methods other than {', '.join(_SAFE)}, which are never guarded",
    "checks": "takes functions of the request, none of them a coroutine",
    "namespaces": "takes names of tasks, or what else is their idempotency_namespace",
    "headers": f"takes names of headers, but none of {', '.join(sorted(NEVER_KEPT))}",
    "attributes": "takes names of attributes that are not a response's own",
    "unstored": "takes statuses below 500; those from 500 are never stored",
}
