"""The options that several commands share: which records are selected, and in which form they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from celery_idempotent.cli.output import note
from celery_idempotent.cli.session import Session
from celery_idempotent.operations import finding
from celery_idempotent.records import Selection, State

#: What click hands to a command: each option has a type of its own.
Given = dict[str, Any]

F = TypeVar("F", bound=Callable[..., object])

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_LENGTH = re.compile(r"([0-9]{1,9})\s*(s|min|m|h|d)", re.ASCII)

_STATE_WORDS = {
    "live": frozenset({State.QUEUED, State.PROCESSING}),
    "stale": frozenset({State.PROCESSING}),
    "any": frozenset(State),
    **{state.value: frozenset({state}) for state in State},
}


class _Length(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A length of time, in milliseconds."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read ``90s``, ``10m``, ``2h`` or ``1d``."""
        if isinstance(value, int):
            return value
        found = _LENGTH.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no length of time: 90s, 10m, 2h or 1d.", param, ctx)
        return int(found[1]) * _UNITS[found[2]] * 1000


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Put these options on a command, in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


#: Which record a KEY is about.
key_options = options(
    click.option("--task", metavar="NAME", help="Only this task (or namespace)."),
    click.option(
        "--scope",
        metavar="SCOPE",
        help="Only this scope; `user 17` for what that user sent over HTTP.",
    ),
)

selection_options = options(
    key_options,
    click.option("--key", metavar="KEY", help="Only this key, in every scope."),
    click.option(
        "--state",
        type=click.Choice(list(_STATE_WORDS), case_sensitive=False),
        help="Only this state. Default: any with --key or --scope, else all but COMPLETED.",
    ),
    click.option(
        "--since", type=_Length(), metavar="TIME", help="Changed within the last 10m, 2h, 1d."
    ),
    click.option(
        "--before", type=_Length(), metavar="TIME", help="Not changed for 10m, 2h, 1d, or longer."
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def selection_of(session: Session, given: Given) -> Selection:
    """Return the selection that these options make; they are taken out of ``given``."""
    task, scope, key, state, since, before = (
        given.pop(name) for name in ("task", "scope", "key", "state", "since", "before")
    )
    now_ms = session.store.now_ms()
    default = frozenset(State) if key or scope else finding.UNFINISHED_AND_FAILED
    return Selection(
        states=_STATE_WORDS[state] if state else default,
        stale=state == "stale",
        namespace=task and known_namespace(session, task),
        scopes=frozenset(scopes_of(scope)) if scope else frozenset(),
        keys=frozenset(finding.spellings(key)) if key else frozenset(),
        since_ms=None if since is None else now_ms - since,
        before_ms=None if before is None else now_ms - before,
    )


def known_namespace(session: Session, name: str) -> str:
    """Return the namespace that a task's name stands for; say so if no task of the app has it."""
    namespace = finding.namespace_of(session.app, name)
    if namespace is None and name not in session.namespaces():
        note(f"No task of this app is called {name}: looking for records of that namespace.")
    return namespace or name


def scopes_of(text: str) -> list[str]:
    """Return the canonical scopes that somebody who types this may mean.

    Raises:
        InvalidKey: if there is no such scope.
    """
    of_user = finding.scope_of_user(text)
    return [of_user] if of_user else finding.spellings(text, what="scope")
