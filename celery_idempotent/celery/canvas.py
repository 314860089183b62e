"""A key that is given to a whole canvas: each of its tasks gets one of its own, made from its place.

Celery hands an option of a group to every member as it is, that of a chain to the first step, in eager mode to all, and
that of an eager chord to the body alone. As it is, then, two tasks would share one key and only one of them would run,
and others would have none. Nothing that a member is told says which of several it is (members of nested groups have the
same ``group_index``), so the key is spread where the tree is still whole, before the canvas is applied::

    K ─ chain ─┬─ a                     K            the first step, if it is a task
               ├─ b                     (K, 1)       else: the key and the way down the tree
               └─ group ─┬─ c           (K, 2, 0)
                         └─ chain ─┬─ d (K, 2, 1)
                                   └─ e (K, 2, 1, 1)

A chord counts as the chain of its header and its body, since that is what Celery makes a chord of: a group with a step
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from celery import canvas as celery_canvas
from celery.canvas import Signature, maybe_signature

from celery_idempotent.celery.receivers import is_foreign
from celery_idempotent.identity.keys import canonical
from celery_idempotent.identity.stamp import (
    KEY_HEADER,
    RAW_KEY,
    RAW_SCOPE,
    SCOPE_HEADER,
    as_mapping,
    read_stamp,
)

__all__ = ["install"]

_CHAIN, _GROUP, _CHORD = "celery.chain", "celery.group", "celery.chord"


@dataclass(frozen=True, slots=True)
class _Given:
    """What a canvas was given, and the way from there to the part at hand."""

    key: Any = None
    scope: Any = None
    path: tuple[int, ...] = ()

    def at(self, index: int) -> _Given:
        """Return what the part at this place is given."""
        return _Given(self.key, self.scope, (*self.path, index))

    def within(self, options: dict[str, Any]) -> _Given:
        """Return what holds below a canvas with these options, which are rid of its own key and scope."""
        key, scope = _take(options, KEY_HEADER, RAW_KEY), _take(options, SCOPE_HEADER, RAW_SCOPE)
        scope = self.scope if scope is None else scope
        return _Given(self.key, scope, self.path) if key is None else _Given(key, scope)


def install() -> None:
    """Let canvases take ``idempotency_key`` and ``idempotency_scope``; without them they do what they did."""
    for name in ("group", "_chain", "_chord"):
        kind: Any = getattr(celery_canvas, name)
        for method in ("apply_async", "apply"):
            setattr(kind, method, _spreading(getattr(kind, method)))


def _spreading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply(canvas: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        own = dict(canvas.options)
        # What the call says goes before what the canvas was made with, as with every option.
        given = _Given().within(own).within(options)
        if given.key is not None or given.scope is not None:
            canvas = canvas.clone()
            canvas.options = own
            _spread(canvas, given)
            if isinstance(kwargs, dict) and kwargs.get("body") is not None:  # chord(header)(body)
                kwargs = {**kwargs, "body": _part(canvas, kwargs["body"], given.at(1))}
            if options.get("body") is not None:
                options["body"] = _part(canvas, options["body"], given.at(1))
        return original(canvas, args, kwargs, *rest, **options)

    return apply


def _spread(canvas: Any, given: _Given) -> None:
    """Give a key to each task in a canvas, which is a copy."""
    if canvas.task == _CHORD:
        header = canvas.tasks
        if isinstance(header, Signature):
            canvas.tasks = _part(canvas, header, given.at(0))
        else:
            canvas.tasks = _parts(canvas, header, given.at(0))
        if canvas.body is not None:
            canvas.body = _part(canvas, canvas.body, given.at(1))
        return
    canvas.tasks = _parts(canvas, canvas.tasks, given, leading=canvas.task == _CHAIN)


def _parts(
    canvas: Any, parts: Iterable[Any], given: _Given, *, leading: bool = False
) -> list[Signature[Any]]:
    return [
        _part(canvas, part, given.at(index), given if leading and index == 0 else None)
        for index, part in enumerate(parts)
    ]


def _part(canvas: Any, part: Any, given: _Given, leading: _Given | None = None) -> Any:
    """Return a copy of a part with its keys; ``leading`` is what it is given if it is a task."""
    part = maybe_signature(part, app=canvas._app, clone=True)  # noqa: SLF001
    options = part.options = dict(part.options)
    if part.task in (_CHAIN, _GROUP, _CHORD):
        _spread(part, given.within(options))
        return part
    given = leading or given
    if is_foreign(part) or str(part.task).startswith("celery."):
        return part
    said = read_stamp(as_mapping(options.get("headers")), options.get("task_id"))
    if given.key is not None and KEY_HEADER not in options and RAW_KEY not in said:
        key = (given.key, *given.path) if given.path else given.key
        canonical(key, task=str(part.task))  # raises before anything is sent
        options[KEY_HEADER] = key
    if given.scope is not None and SCOPE_HEADER not in options and RAW_SCOPE not in said:
        canonical(given.scope, what="scope", task=str(part.task))
        options[SCOPE_HEADER] = given.scope
    return part


def _take(options: dict[str, Any], name: str, word: str) -> Any:
    """Take an option, or a header of this name; Celery's stamps are options, too, and stay."""
    if name in (options.get("stamped_headers") or ()):
        return None
    value = options.pop(name, None)
    headers = options.get("headers")
    if isinstance(headers, dict) and name in headers:
        options["headers"] = {each: headers[each] for each in headers if each != name}
        value = read_stamp(headers, None).get(word) if value is None else value
    return value
