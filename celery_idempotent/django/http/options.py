"""How a view is guarded: the arguments of its decorator over the setting ``IDEMPOTENCY_HTTP``, checked and frozen.

::

    IDEMPOTENCY_HTTP = {"lease": 60, "required": False}    the setting
    @idempotent_view(lease=5)                              the view: HttpOptions(lease_ms=5_000, required=False, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Literal

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.http import HttpResponse
from django.utils.module_loading import import_string

from celery_idempotent.errors import InvalidOption
from celery_idempotent.identity.identified import MAX_CHARS
from celery_idempotent.protocol.options import (
    Reader,
    SharedOptions,
    ViewKind,
    ViewKinds,
    accept_if,
    duration,
    fields_by_option,
    flag,
    one_of,
    option,
    optional,
    read_options,
    whole_number,
)
from celery_idempotent.protocol.policy import Policy

if TYPE_CHECKING:
    from django.http import HttpResponseBase

#: The one setting: a dict with any of the options of :class:`HttpOptions`.
HTTP_SETTING: Final = "IDEMPOTENCY_HTTP"

#: Headers of a response that a replay does not have, lower case. All others are stored with it.
NEVER_KEPT: Final = frozenset(
    (
        # They belong to one answer or one caller's login:
        *("age", "authentication-info", "date", "set-cookie", "www-authenticate"),
        # to one connection (RFC 9110, 7.6.1):
        *("connection", "content-length", "keep-alive", "proxy-authenticate", "proxy-connection"),
        *("proxy-authentication-info", "te", "trailer", "transfer-encoding", "upgrade", "via"),
        # and to one trace.
        *("b3", "server-timing", "traceparent", "tracestate", "traceresponse", "uber-trace-id"),
        *(
            "x-amzn-trace-id",
            "x-b3-sampled",
            "x-b3-spanid",
            "x-b3-traceid",
            "x-cloud-trace-context",
        ),
        *("x-correlation-id", "x-request-id"),
    )
)
#: Attributes of a response that are kept for its replays; ``attributes`` adds to them. Decorators of Django and of
#: django-csp set them, and their middleware reads them.
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
#: Takes the request: Django's ``HttpRequest`` or, in a view of Django REST framework, that framework's ``Request``.
RequestFunction = Callable[..., object]

#: Runs before the key is looked up: an answer that it returns is sent, and not stored.
Check = Callable[..., "HttpResponseBase | None"]

Anonymous = Literal["refuse", "session"]
OnConflict = Literal["refuse", "wait"]
OnPending = Literal["accept", "refuse"]
ShowErrors = Literal["none", "permanent", "all"]

_SAFE: Final = ("GET", "HEAD", "OPTIONS", "TRACE")

_string = accept_if(lambda value: isinstance(value, str), "must be a string")
_seconds = accept_if(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0,
    "must be 0 or a positive number",
)
_namespace_text = accept_if(
    lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_CHARS,
    f"must be 1 to {MAX_CHARS} printable characters",
)


def _imported(value: object) -> object:
    try:
        return import_string(value) if isinstance(value, str) else value
    except ImportError as error:
        raise ValueError(f"cannot be imported: {error}") from error


def _callable(value: object) -> RequestFunction:
    found = _imported(value)
    if not callable(found) or iscoroutinefunction(found):
        raise ValueError("must be a function of the request, no coroutine, or its dotted path")
    return found


def _sequence_of(
    accepts: Callable[[object], bool],
    message: str,
    convert: Callable[[object], object] = lambda item: item,
) -> Reader:
    """Return a reader of a sequence: it converts each item, and refuses with ``message`` if one is not accepted."""

    def read(value: object) -> tuple[object, ...]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError("must be a sequence")
        items = tuple(map(convert, value))
        if not all(map(accepts, items)):
            raise ValueError(message)
        return items

    return read


_unsafe_methods = _sequence_of(
    lambda item: isinstance(item, str) and item not in _SAFE,
    f"must be methods other than {', '.join(_SAFE)}, which are never guarded",
    convert=lambda item: item.upper() if isinstance(item, str) else item,
)
_checks = _sequence_of(
    lambda item: callable(item) and not iscoroutinefunction(item),
    "must be functions of the request, none of them a coroutine",
    convert=_imported,
)
_attribute_names = _sequence_of(
    lambda item: (
        isinstance(item, str) and item.isidentifier() and not hasattr(HttpResponse(), item)
    ),
    "must be names of attributes that are not a response's own",
)
_namespaces = _sequence_of(
    lambda item: isinstance(item, str),
    "must be namespaces of tasks: their idempotency_namespace, or else their names",
)
_statuses = _sequence_of(
    lambda item: isinstance(item, int) and 100 <= item < 500,
    "must be statuses below 500; those from 500 are never stored",
)

#: The decorators that take an option; without ``views`` only ``idempotent_view`` does.
_BOTH: Final[ViewKinds] = ("idempotent", "keyed")
_KEYED: Final[ViewKinds] = ("keyed",)
_SETTING_ONLY: Final[ViewKinds] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions(SharedOptions):
    """The options of ``IDEMPOTENCY_HTTP``, in addition to :class:`SharedOptions`.

    The decorators take those whose ``views`` names them: ``keyed_view`` a few, and none of the shared ones.
    """

    lease_ms: int = option(30_000, duration(at_least_ms=100))
    scope: RequestFunction | None = option(None, optional(_callable), views=_BOTH)
    anonymous: Anonymous = option("refuse", one_of(Anonymous), views=_BOTH)
    required: bool = option(True, flag, views=_BOTH)
    strict: bool = option(False, flag, views=_BOTH)
    namespace: str = option("http", _namespace_text)
    methods: tuple[str, ...] = option(
        ("POST", "PUT", "PATCH", "DELETE"), _unsafe_methods, views=_BOTH
    )
    checks: tuple[Check, ...] = option((), _checks)
    authorize: Callable[..., object] | None = option(None, optional(_callable))
    fingerprint: RequestFunction | None = option(None, optional(_callable))
    on_conflict: OnConflict = option("refuse", one_of(OnConflict))
    on_pending: OnPending = option("accept", one_of(OnPending), views=_KEYED)
    retry_after: float = option(1, _seconds, views=_BOTH)
    attributes: tuple[str, ...] = option((), _attribute_names)
    unstored: tuple[int, ...] = option(
        (400, 401, 403, 405, 406, 408, 411, 413, 415, 425, 429), _statuses
    )
    max_request_bytes: int = option(10 * 1024 * 1024, whole_number, views=_BOTH)
    max_response_bytes: int = option(1024 * 1024, whole_number)
    show_errors: ShowErrors = option("permanent", one_of(ShowErrors), views=_KEYED)
    docs_url: str | None = option(None, optional(_string), views=_BOTH)
    app: str | None = option(None, optional(_string))
    namespaces: tuple[str, ...] | None = option(None, optional(_namespaces), views=_SETTING_ONLY)

    @property
    def policy(self) -> Policy:
        """The policy of the runner that guards the view."""
        shared = {each.name: getattr(self, each.name) for each in fields(SharedOptions)}
        return Policy(
            **shared,
            on_conflict="wait" if self.on_conflict == "wait" else "raise",
            max_result_bytes=self.max_response_bytes,
        )

    def shows(self, namespace: str) -> bool:
        """Does the status resource show keys of this namespace?"""
        return self.namespaces is None or namespace in self.namespaces

    def is_stored(self, status: int) -> bool:
        """Is an answer with this status stored, and repeated? After any other the request may be tried again."""
        return status < 500 and status not in self.unstored


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


def refuse_unused(given: Mapping[str, object], kind: ViewKind) -> None:
    """Refuse options that were given to the decorator of one ``kind`` of views, and that it does not take.

    Raises:
        InvalidOption: naming them, and where they belong.
    """
    known = fields_by_option(HttpOptions)
    if "namespaces" in given:
        raise InvalidOption(
            f"namespaces is for the status resource, which all views share: put it into {HTTP_SETTING}."
        )
    unused = [name for name in given if name in known and kind not in known[name].metadata["views"]]
    if unused:
        place = (
            "keyed_view" if kind == "idempotent" else "idempotent_view, or an option of the task"
        )
        raise InvalidOption(
            f"{', '.join(sorted(unused))} does nothing for {kind}_view: it is for {place}."
        )
