"""``check --keys``: a deploy that would change a key is told so, with the transition to use."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import ALL_ARGUMENTS, IdempotentTask
from celery_idempotent.cli import idempotency
from tests.stores.test_deploying import CHANGES

SECRET = "sk_live_4711"


def charge(order: str, kind: str = "sale", tenant: str = "t") -> None: ...
def charge_with_note(order: str, kind: str = "sale", tenant: str = "t", note: str = "") -> None: ...
def charge_without_kind(order: str, tenant: str = "t") -> None: ...
def charge_as_refund(order: str, kind: str = "refund", tenant: str = "t") -> None: ...
def charge_of_number(number: str, kind: str = "sale", tenant: str = "t") -> None: ...


def order_of(order: str, **_: Any) -> str:
    return order


def order_at_this_place(order: str, **_: Any) -> str:
    return f"here-{order}"


order_at_this_place.__qualname__ = "order_of"


def task(function: Callable[..., None] = charge, **options: Any) -> tuple[Any, dict[str, Any]]:
    return function, options


def make_app(tasks: dict[str, tuple[Any, dict[str, Any]]]) -> Celery:
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    for name, (function, options) in tasks.items():
        named = {"name": name, **options}
        app.task(base=IdempotentTask, shared=False, **named)(function)
    app.finalize()
    return app


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run ``check --keys`` on an app with these tasks; there is no store."""

    def run(tasks: dict[str, Any], *words: str) -> Result:
        app = make_app(tasks)
        command = ["check", "--keys", str(tmp_path / "keys.lock"), *words]
        result = CliRunner().invoke(idempotency, command, obj=SimpleNamespace(app=app))
        app.close()
        assert result.exit_code in (0, 1, 2), result.exception
        return result

    return run


def found(result: Result) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == (1 if lines else 0), result.output
    return [(line["task"], line["change"]) for line in lines]


KEYED: dict[str, Any] = {"idempotency_key": "order"}
ALL: dict[str, Any] = {"idempotency_key": ALL_ARGUMENTS}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_transition_covers_is_no_finding_and_without_it_is_one(run, change):
    before, after = CHANGES[change]
    old = {"charge": task(**before)}
    assert run(old, "--write").exit_code == 0
    name = after.get("name", "charge")
    both = {**after, "idempotency_namespace": after.get("idempotency_namespace", name)}
    new = {each: task(**{**both, "name": each}) for each in ("charge", name)}
    covered = run(new, "--json")
    assert found(covered) == []
    assert "says what they were" in covered.stderr
    bare: dict[str, Any] = {
        option: value for option, value in both.items() if not option.endswith("_before")
    }
    told = run({"charge": task(**{**bare, "name": "charge"})})
    for option, value in after.items():
        if option.endswith("_before"):
            assert f"Set {option}={value!r} " in told.stdout
    assert told.exit_code == 1


@pytest.mark.parametrize(
    ("was", "now", "changes", "said"),
    [
        (task(**KEYED), task(charge_with_note, **KEYED), ["parameters"], "stay the same"),
        (task(**KEYED), task(charge_without_kind, **KEYED), ["parameters"], "is refused with"),
        (task(**KEYED), task(charge_as_refund, **KEYED), ["parameters"], "is refused with"),
        (task(**ALL), task(charge_without_kind, **ALL), ["parameters"], "has another key"),
        (task(**ALL), task(charge_with_note, **ALL), ["parameters"], "stay the same"),
        (
            task(idempotency_key="kind", idempotency_fingerprint=None),
            task(charge_as_refund, idempotency_key="kind", idempotency_fingerprint=None),
            ["parameters"],
            "has another key",
        ),
        (
            task(**KEYED, idempotency_fingerprint=None),
            task(charge_without_kind, **KEYED, idempotency_fingerprint=None),
            [],
            "No key changes",
        ),
        # A task without a key compares nothing.
        (task(), task(charge_without_kind), [], "No key changes"),
        (
            task(**KEYED),
            task(charge_of_number, idempotency_key="number"),
            ["key", "parameters"],
            "if it was renamed",
        ),
        (
            task(**KEYED),
            task(**KEYED, idempotency_fingerprint="kind"),
            ["fingerprint"],
            "idempotency_fingerprint=None for one retention",
        ),
        (task(**KEYED), task(**KEYED, idempotency_fingerprint=None), [], "whatever their"),
        (task(**KEYED, idempotency_fingerprint=None), task(**KEYED), [], "from now on"),
        (
            task(**KEYED),
            task(
                idempotency_key="kind",
                idempotency_key_before="order",
                idempotency_fingerprint="kind",
            ),
            ["fingerprint"],
            "runs again",
        ),
        (
            task(idempotency_key="kind", idempotency_key_before="order"),
            task(idempotency_key="kind"),
            ["key_before"],
            "Leave it in until one retention",
        ),
        (
            task(idempotency_key="kind"),
            task(idempotency_key="order", idempotency_key_before="tenant"),
            ["key"],
            "idempotency_key_before='kind'",
        ),
        (
            task(idempotency_key=order_of),
            task(idempotency_key=order_at_this_place),
            ["key"],
            "with another text",
        ),
        (
            task(idempotency_key=order_of),
            task(idempotency_key=order_at_this_place, idempotency_key_before=order_of),
            [],
            "says what they were",
        ),
        (task(**KEYED), task(**KEYED, idempotency_mode="off"), ["removed"], "no longer protected"),
    ],
)
def test_what_is_said_of_a_change(run, was, now, changes, said):
    assert run({"charge": was}, "--write").exit_code == 0
    result = run({"charge": now}, "--json")
    assert found(result) == [("charge", change) for change in changes]
    assert said in result.output


def test_a_rename_is_told_with_the_name_that_it_has_now(run):
    run({"charge": task(**KEYED)}, "--write")
    result = run({"pay": task(**KEYED)}, "--json")
    assert found(result) == [("charge", "removed"), ("pay", "added")]
    assert "let pay say idempotency_namespace_before='charge'" in result.stdout


def test_write_takes_what_changes_no_key_and_the_rest_only_if_it_is_accepted(run, tmp_path):
    run({"charge": task(**KEYED), "gone": task(**KEYED)}, "--write")
    first = (tmp_path / "keys.lock").read_text()
    new = {"charge": task(idempotency_key="kind"), "new": task(**KEYED)}
    assert found(run(new, "--json")) == [
        ("charge", "key"),
        ("gone", "removed"),
        ("new", "added"),
    ]
    assert (tmp_path / "keys.lock").read_text() == first
    assert found(run(new, "--json", "--write")) == [("charge", "key"), ("gone", "removed")]
    assert found(run(new, "--json", "--write", "--accept", "charge")) == [("gone", "removed")]
    assert found(run(new, "--json", "--write", "--accept", "gone")) == []
    assert found(run(new, "--json")) == []
    assert [each.name for each in tmp_path.iterdir()] == ["keys.lock"]


def test_the_file_is_sorted_and_has_no_values(run, tmp_path):
    """A default may be a setting's value, and what a function is bound to may be anything."""

    def with_secret(order: str, token: str = SECRET) -> None: ...

    def of_order(token: str, order: str, **_: Any) -> str:
        return order

    bound = functools.partial(of_order, SECRET)
    tasks = {
        "pay": task(with_secret, **ALL),
        "charge": task(idempotency_key=lambda order, **_: order),
        "bound": task(idempotency_key=bound),
        "plain": task(),
    }
    assert run(tasks, "--write").exit_code == 0
    text = (tmp_path / "keys.lock").read_text()
    assert SECRET not in text
    lock = json.loads(text)["tasks"]
    assert [*lock] == sorted(tasks)
    assert lock["plain"] == {
        "namespace": "plain",
        "key": None,
        "scope": None,
        "fingerprint": None,
        "parameters": {},
    }
    assert lock["pay"]["parameters"]["order"] == "required"
    assert run(dict(reversed(tasks.items())), "--write").exit_code == 0
    assert (tmp_path / "keys.lock").read_text() == text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<<<<<<< HEAD",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"version": 1, "tasks": []}',
        b'{"version": 1, "tasks": {"a": {"key": 1}}}',
        (
            b'{"version": 1, "tasks": {"a": {"namespace": "a", "key": {"x": "y"}, '
            b'"scope": null, "fingerprint": null, "parameters": {}}}}'
        ),
        b'{"version": 2, "tasks": {}}',
        b" " * (16 * 1024 * 1024 + 1),
    ],
)
def test_a_file_that_is_none_is_wrong_usage_and_stays_as_it_is(run, tmp_path, text):
    path = tmp_path / "keys.lock"
    path.write_bytes(text)
    for words in ([], ["--write"]):
        result = run({}, *words)
        assert result.exit_code == 2
        assert "cannot be read" in result.output
    assert path.read_bytes() == text


@pytest.mark.parametrize("words", [[], ["--health"], ["--accept", "charge"]])
def test_what_cannot_be_meant_is_wrong_usage(run, words):
    assert run({"charge": task()}, *words).exit_code == 2


def test_accept_names_a_task(run):
    assert "neither the app" in run({"charge": task()}, "--write", "--accept", "chrage").output


def test_write_that_fails_leaves_what_was(run, tmp_path):
    (tmp_path / "keys.lock").mkdir()
    assert run({}, "--write").exit_code == 2
