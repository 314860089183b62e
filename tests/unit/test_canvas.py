"""What key each task of a canvas gets when the whole is given one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.canvas import Signature
from celery.signals import before_task_publish

from celery_idempotent import IdempotentTask, InvalidKey
from celery_idempotent.identity.trees import canvas_tasks


def step(name: str) -> str:
    return name


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("canvas", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    for name, base in {"ours": IdempotentTask, "theirs": Task}.items():
        app.task(name=name, base=base, shared=False)(step)
    yield app
    app.close()


@pytest.fixture
def keys() -> Iterator[dict[str, tuple[Any, Any]]]:
    """The key and scope of each call that is published, and of what it carries along: by the call's argument."""
    found: dict[str, tuple[Any, Any]] = {}

    def note(headers: Any = None, body: Any = None, **_: Any) -> None:
        args, _kwargs, embed = body
        stamp = headers.get("idempotency") or {}
        names = "idempotency_key", "idempotency_scope"
        raw = tuple(headers.get(name) for name in names)
        found[args[0]] = (stamp["key"], stamp.get("scope")) if "key" in stamp else raw
        for carried in [*(embed.get("chain") or ()), embed.get("chord")]:
            for leaf in canvas_tasks(carried):
                assert leaf["args"][0] not in found or leaf["task"] == "ours"
                found[leaf["args"][0]] = tuple(leaf["options"].get(name) for name in names)  # type: ignore[assignment]

    before_task_publish.connect(note)
    yield found
    before_task_publish.disconnect(note)


class Say:
    """Signatures that no result goes into, each with an argument of its own."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    def __call__(self, name: str, task: str = "ours", **options: Any) -> Signature[Any]:
        return self.app.tasks[task].si(name).set(**options)


@pytest.fixture
def say(app: Celery) -> Say:
    return Say(app)


def only_keys(keys: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: key for name, (key, _) in keys.items()}


def test_members_of_a_group(say: Say, keys: dict[str, Any]) -> None:
    group([say("a"), say("b")]).apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": '["K",0]', "b": '["K",1]'}


def test_members_of_nested_groups_that_share_an_index(say: Say, keys: dict[str, Any]) -> None:
    group([say("a"), group([say("b"), say("c")])]).apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": '["K",0]', "b": '["K",1,0]', "c": '["K",1,1]'}


def test_a_generator_of_members(say: Say, keys: dict[str, Any]) -> None:
    group(say(each) for each in "ab").apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": '["K",0]', "b": '["K",1]'}


def test_steps_of_a_chain(say: Say, keys: dict[str, Any]) -> None:
    """The first has the key itself, as any option of a chain goes to its first step."""
    chain(say("a"), say("b"), say("c")).apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": "K", "b": ("K", 1), "c": ("K", 2)}


def test_steps_of_chains_in_a_group(say: Say, keys: dict[str, Any]) -> None:
    members = [chain(say("a"), say("b")), chain(say("c"), say("d")), say("e")]
    group(members).apply_async(idempotency_key="K")
    assert only_keys(keys) == {
        "a": '["K",0]',
        "b": ("K", 0, 1),
        "c": '["K",1]',
        "d": ("K", 1, 1),
        "e": '["K",2]',
    }


@pytest.mark.parametrize("way", ["chord", "called with its body", "chain"])
def test_a_chord_is_the_chain_of_its_header_and_body(
    say: Say, keys: dict[str, Any], way: str
) -> None:
    header, body = [say("a"), say("b")], say("c")
    if way == "chord":
        chord(header, body).apply_async(idempotency_key="K")
    elif way == "chain":
        chain(group(header), body).apply_async(idempotency_key="K")
    else:
        chord(header)(body, idempotency_key="K")
    found = {name: key for name, key in only_keys(keys).items() if name != "c"}
    assert found == {"a": '["K",0,0]', "b": '["K",0,1]'}


def test_chords_in_a_group(say: Say, keys: dict[str, Any]) -> None:
    members = [chord([say("a"), say("b")], say("c")), chord([say("d"), say("e")], say("f"))]
    group(members).apply_async(idempotency_key="K")
    found = {name: key for name, key in only_keys(keys).items() if name not in "cf"}
    assert found == {"a": '["K",0,0,0]', "b": '["K",0,0,1]', "d": '["K",1,0,0]', "e": '["K",1,0,1]'}


def test_a_key_of_its_own_stays(say: Say, keys: dict[str, Any]) -> None:
    own: Any = group([say("c"), say("d")])
    own.set(idempotency_key="G")
    members = [
        say("a", idempotency_key="A"),
        say("b", headers={"idempotency_key": "B"}),
        own,
        say("e"),
    ]
    group(members).apply_async(idempotency_key="K")
    assert only_keys(keys) == {
        "a": "A",
        "b": "B",
        "c": '["G",0]',
        "d": '["G",1]',
        "e": '["K",3]',
    }


def test_what_the_call_says_goes_before_what_the_canvas_has(say: Say, keys: dict[str, Any]) -> None:
    whole: Any = group([say("a")])
    whole.set(idempotency_key="G").apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": '["K",0]'}


def test_a_key_among_the_headers_of_a_group(say: Say, keys: dict[str, Any]) -> None:
    group([say("a"), say("b")]).apply_async(headers={"idempotency_key": "K", "x": "y"})
    assert only_keys(keys) == {"a": '["K",0]', "b": '["K",1]'}


def test_the_scope_is_that_of_every_task(say: Say, keys: dict[str, Any]) -> None:
    chain(say("a"), say("b", idempotency_scope="own"), say("c")).apply_async(
        idempotency_key="K", idempotency_scope="S"
    )
    assert keys == {"a": ("K", "S"), "b": (("K", 1), "own"), "c": (("K", 2), "S")}


def test_tasks_that_are_none_of_ours_are_left_alone(say: Say, keys: dict[str, Any]) -> None:
    group([say("a", "theirs"), say("b")]).apply_async(idempotency_key="K")
    assert only_keys(keys) == {"a": None, "b": '["K",1]'}


def test_the_canvas_itself_is_left_as_it_was(say: Say) -> None:
    whole: Any = chain(say("a"), group([say("b"), chain(say("c"), say("d"))]))
    whole.set(idempotency_key="K")
    before = repr(dict(whole)), whole.options.copy()
    whole.apply_async()
    assert (repr(dict(whole)), whole.options) == before
    assert not any("idempotency_key" in leaf["options"] for leaf in canvas_tasks(whole))


def test_a_key_that_cannot_be_used_for_all_is_refused_before_anything_is_sent(
    say: Say, keys: dict[str, Any]
) -> None:
    with pytest.raises(InvalidKey, match=r"of task ours has 25[0-9] characters"):
        group([say("a"), group([say("b")])]).apply_async(idempotency_key=249 * "x")
    assert keys == {}
