"""A key that is given to a whole canvas: each of its tasks gets one of its own, made from its place.

Celery hands an option of a group to every member as it is, that of a chain to the first step, in eager mode to all, and
that of an eager chord to the body alone. As it is, then, two tasks would share one key and only one of them would run,
and others would have none. Nothing in its message says which member a task is (members of nested groups have
the same ``group_index``), so the key is spread where the tree is still whole, before the canvas is applied::

    K ─ chain ─┬─ a                     K            the first step, if it is a task
               ├─ b                     (K, 1)       else: the key and the way down the tree
               └─ group ─┬─ c           (K, 2, 0)
                         └─ chain ─┬─ d (K, 2, 1)
                                   └─ e (K, 2, 1, 1)

A chord counts as the chain of its header and its body, since that is what Celery makes a chord of: a group with a step
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from celery import canvas as celery_canvas
from celery.canvas import maybe_signature

from celery_idempotent.celery import registry
from celery_idempotent.celery.typed import Options, Result, Sig
from celery_idempotent.errors import InvalidKey
from celery_idempotent.identity import stamp, trees
from celery_idempotent.identity.keys import canonical
from celery_idempotent.identity.stamp import as_mapping

_CHAIN, _CHORD = "celery.chain", "celery.chord"

#: A chord counts as the chain of its header and its body.
_OF_A_CHORD: dict[trees.Place, trees.Place] = {("header",): (0,), ("body",): (1,)}


@dataclass(frozen=True, slots=True)
class _Given:
    """What a canvas was given, and the way from there to the part at hand."""

    key: object = None
    scope: object = None
    path: trees.Place = ()

    def at(self, place: trees.Place) -> _Given:
        """Return what the part at this place is given."""
        return _Given(self.key, self.scope, (*self.path, *place))

    def within(self, options: Options) -> _Given:
        """Return what holds below a canvas with these options, which are rid of its own key and scope."""
        key, scope = (
            _take(options, stamp.KEY_HEADER, stamp.RAW_KEY),
            _take(options, stamp.SCOPE_HEADER, stamp.RAW_SCOPE),
        )
        scope = self.scope if scope is None else scope
        return _Given(self.key, scope, self.path) if key is None else _Given(key, scope)


def take_keys() -> None:
    """Let canvases take ``idempotency_key`` and ``idempotency_scope``; without them they do what they did."""
    for name in ("group", "_chain", "_chord"):
        kind = getattr(celery_canvas, name)
        for method in ("apply_async", "apply"):
            setattr(kind, method, _spreading(getattr(kind, method)))


def _spreading(original: Callable[..., Result]) -> Callable[..., Result]:
    @wraps(original)
    def apply(
        canvas: Any, args: object = None, kwargs: object = None, *rest: object, **options: object
    ) -> Result:
        if not registry.is_installed(canvas.app):
            return original(canvas, args, kwargs, *rest, **options)
        own = dict(canvas.options)
        # What the call says goes before what the canvas was made with, as with every option.
        given = _Given().within(own).within(options)
        if given.key is not None or given.scope is not None:
            canvas = canvas.clone()
            canvas.options = own
            _spread(canvas, given)
            if isinstance(kwargs, dict) and kwargs.get("body") is not None:  # chord(header)(body)
                kwargs = {**kwargs, "body": _part(canvas, kwargs["body"], given.at((1,)))}
            if options.get("body") is not None:
                options["body"] = _part(canvas, options["body"], given.at((1,)))
        return original(canvas, args, kwargs, *rest, **options)

    return apply


def _spread(canvas: Sig, given: _Given) -> None:
    """Give a key to each task in a canvas, which is a copy."""

    def part(inner: object, place: trees.Place) -> object:
        leads = canvas.task == _CHAIN and place == (0,)
        if canvas.task == _CHORD:
            place = _OF_A_CHORD.get(place, (0, *place))
        return _part(canvas, inner, given.at(place), given if leads else None)

    canvas["kwargs"] = trees.with_parts(canvas, part)


def _part(canvas: Any, part: Any, given: _Given, leading: _Given | None = None) -> object:
    """Return a copy of a part with its keys; ``leading`` is what it is given if it is a task."""
    part = maybe_signature(part, app=canvas._app, clone=True)  # noqa: SLF001
    options = part.options = dict(part.options)
    if trees.is_canvas(part):
        _spread(part, given.within(options))
        return part
    given = leading or given
    if registry.is_other_task(part.app, str(part.task)) or str(part.task).startswith("celery."):
        return part
    said = stamp.read_stamp(as_mapping(options.get("headers")), options.get("task_id"))
    key = (given.key, *given.path) if given.key is not None and given.path else given.key
    for value, what, header, word in (
        (key, "key", stamp.KEY_HEADER, stamp.RAW_KEY),
        (given.scope, "scope", stamp.SCOPE_HEADER, stamp.RAW_SCOPE),
    ):
        absent = header not in options and word not in said
        if value is not None and absent and _is_usable(part, value, what):
            options[header] = value
    return part


def _is_usable(part: Any, value: object, what: str) -> bool:
    """Return ``True``, or raise before anything is sent; ``False`` if the task is only observed."""
    try:
        canonical(value, what=what, task=str(part.task))
    except InvalidKey as error:
        task = part.app.tasks.get(part.task)
        definition = task.idempotency_definition() if task is not None else None
        if definition is None or definition.policy.mode != "observe":
            raise
        definition.observed(error, "")
        return False
    return True


def _take(options: Options, name: str, word: str) -> object:
    """Take an option, or a header of this name; Celery's stamps are options, too, and stay."""
    if name in (options.get("stamped_headers") or ()):
        return None
    value = options.pop(name, None)
    headers = options.get("headers")
    if isinstance(headers, dict) and name in headers:
        options["headers"] = {each: headers[each] for each in headers if each != name}
        value = stamp.read_stamp(headers, None).get(word) if value is None else value
    return value
