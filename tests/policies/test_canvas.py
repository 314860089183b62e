"""Canvas, broken in the middle: every step takes effect once, chords complete, chains keep their tails.

What is sent is counted where it arrives, and what takes effect by the tasks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from tests.policies.conftest import PATIENCE, Site
from tests.support.waiting import wait_for


@dataclass(frozen=True)
class Shape:
    """A canvas; ``crash`` names steps whose process dies, one after the other."""

    build: Callable[[Say], Any]
    result: Any
    effects: str
    crash: str


class Say:
    """Signatures of one canvas: each letter is one step."""

    def __init__(self, site: Site, key: str) -> None:
        self.app = site.app
        self.key = key

    def __call__(self, letter: str, *, name: str = "say", immutable: bool = False) -> Any:
        signature = self.app.tasks[name].s(f"{self.key}/{letter}")
        return signature.set(immutable=True) if immutable else signature

    def mourn(self, letter: str) -> Any:
        return self.app.tasks["mourn"].s(label=f"{self.key}/{letter}")


def _linked(say: Say) -> Any:
    signature = say("a")
    signature.link(say("b"))
    signature.link(chain(say("c"), say("d")))
    signature.link(group([say("e"), say("f")], app=say.app))
    signature.link(say("g", immutable=True))
    return signature


def _linked_deeply(say: Say) -> Any:
    inner = say("b")
    inner.link(say("c"))
    signature = say("a")
    signature.link(inner)
    return signature


def _linked_chord(say: Say) -> Any:
    body = say("d")
    body.link(say("e"))
    return chord([say("a"), say("b"), say("c")], body, app=say.app)


SHAPES = {
    "chain": Shape(lambda say: chain(say("a"), say("b"), say("c")), "abc", "abc", "ac"),
    "immutable": Shape(
        lambda say: chain(say("a"), say("b", immutable=True), say("c")), "bc", "abc", "b"
    ),
    "group": Shape(
        lambda say: group([say("a"), say("b"), say("c")], app=say.app), ["a", "b", "c"], "abc", "b"
    ),
    "chord": Shape(
        lambda say: chord([say("a"), say("b"), say("c")], say("d"), app=say.app),
        "abcd",
        "abcd",
        "bd",
    ),
    "chord in a chain": Shape(
        lambda say: chain(say("a"), group([say("b"), say("c")], app=say.app), say("d"), say("e")),
        "abacde",
        "abcde",
        "acd",
    ),
    "nested": Shape(
        lambda say: group(
            [
                chain(say("a"), say("b")),
                chord([chain(say("c"), say("d")), say("e")], say("f"), app=say.app),
            ],
            app=say.app,
        ),
        ["ab", "cdef"],
        "abcdef",
        "ad",
    ),
    "links": Shape(_linked, "a", "abcdefg", "a"),
    "links of links": Shape(_linked_deeply, "a", "abc", "ab"),
    "link of a chord's body": Shape(_linked_chord, "abcd", "abcde", "cd"),
    "plain steps": Shape(
        lambda say: chain(say("a"), say("b", name="plain_say"), say("c")), "abc", "abc", "c"
    ),
}

EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def first(*names: str) -> pytest.MarkDecorator:
    """These shapes, which have in them what the others are made of; the others are wide."""
    params = [
        pytest.param(shape, id=name, marks=() if name in names else pytest.mark.wide)
        for name, shape in SHAPES.items()
    ]
    return pytest.mark.parametrize("shape", params)


def start(site: Site, key: str, shape: Shape) -> Any:
    return shape.build(Say(site, key)).apply_async()


def finish(site: Site, key: str, shape: Shape, result: Any) -> None:
    """Every step took effect once, and the result is right."""
    assert result.get(timeout=PATIENCE) == shape.result
    site.idle(key)
    wanted = dict.fromkeys((f"{key}/{each}" for each in shape.effects), 1)
    wait_for(
        lambda: site.effects(key) == wanted, PATIENCE, lambda: f"{wanted}: {site.effects(key)}"
    )
    assert result.get(timeout=PATIENCE) == shape.result


class TestRedelivery:
    @EVERY_SHAPE
    def test_redelivering_one_step_or_all_afterwards_is_silent(self, on_redis, key, shape):
        """No callback, no next step, no chord part is sent a second time: counted where it would arrive."""
        result = start(on_redis, key, shape)
        finish(on_redis, key, shape, result)
        first = on_redis.receipts(key)
        assert len(first) == len(shape.effects)
        guarded = [each for each in first if each["name"] != "plain_say"]
        for copies in (guarded[:1], guarded):
            before = len(on_redis.receipts(key))
            for copy in copies:
                on_redis.deliver_again(copy)
            finish(on_redis, key, shape, result)
            arrived = [each["id"] for each in on_redis.receipts(key)[before:]]
            assert sorted(arrived) == sorted(each["id"] for each in copies)


class TestCrashes:
    @EVERY_SHAPE
    def test_a_crash_before_the_sending_loses_nothing_and_doubles_nothing(
        self, on_redis, key, shape
    ):
        """Between the settle and the sending."""
        self.crash(on_redis, key, shape, "settled")

    @first("chord in a chain", "links")
    @pytest.mark.parametrize("point", ["sent", "delivered"])
    def test_a_crash_after_the_sending_doubles_nothing(self, on_redis, key, shape, point):
        """In a hook of the task's own, and in a signal's receiver."""
        self.crash(on_redis, key, shape, point)

    def crash(self, on_redis: Site, key: str, shape: Shape, point: str) -> None:
        for letter in shape.crash:
            on_redis.crash(point, f"{key}/{letter}")
        finish(on_redis, key, shape, start(on_redis, key, shape))
        crashes = [e for e in on_redis.ledger.entries("crash") if key in e.key]
        assert sorted(e.key for e in crashes) == [f"{point} {key}/{e}" for e in shape.crash]
        # Celery >= 5.7 acknowledges what was lost after its result was stored; others deliver it again.
        copies = [on_redis.receipt(each.task_id) for each in crashes]
        before = len(on_redis.receipts(key))
        for copy in copies:
            on_redis.deliver_again(copy)
        on_redis.idle(key)
        sent = len(on_redis.receipts(key)) - before
        assert sent == len(copies) if point != "sent" else sent >= len(copies)
        labels = (f"{key}/{each}" for each in shape.effects)
        assert on_redis.effects(key) == dict.fromkeys(labels, 1)

    @pytest.mark.parametrize("point", ["settled", "sent", "delivered"])
    def test_callbacks_of_a_failure_run_once(self, on_redis, key, point):
        say = Say(on_redis, key)
        signature = say("a", name="refuse")
        signature.link_error(say.mourn("x"))
        signature.link_error(say.mourn("y"))
        if point != "delivered":  # told by task_success
            on_redis.crash(point, f"{key}/a")
        result = signature.apply_async()
        with pytest.raises(Exception, match="expired"):
            result.get(timeout=PATIENCE)
        on_redis.idle(key)
        on_redis.deliver_again(on_redis.receipt(result.id))
        on_redis.idle(key)
        assert on_redis.effects(key) == {f"{key}/{each}": 1 for each in "axy"}
        assert on_redis.ledger.count("crash", f"{point} {key}/a") == (point != "delivered")


class TestErrbacks:
    def test_a_failed_member_fails_its_chord_once(self, on_redis, key):
        say = Say(on_redis, key)
        body = say("d")
        body.link_error(say.mourn("x"))
        header = [say("a"), say("b", name="refuse")]
        result = chord(header, body, app=on_redis.app).apply_async()
        with pytest.raises(Exception, match="expired"):
            result.get(timeout=PATIENCE)
        on_redis.idle(key)
        for receipt in on_redis.receipts(key):
            on_redis.deliver_again(receipt)
        on_redis.idle(key)
        assert on_redis.effects(key) == {f"{key}/{each}": 1 for each in "abx"}


class TestDuplicates:
    """The same business key under another task id: the canvas completes with the stored value."""

    def test_a_duplicate_in_a_chord_completes_it(self, shared, key):
        pay, say = shared.app.tasks["pay_once"], Say(shared, key)
        result = chord([pay.s(key), pay.s(key), pay.s(key)], say("a"), app=shared.app).apply_async()
        text = result.get(timeout=PATIENCE)
        shared.idle(key)
        paid = shared.record("pay_once", key)
        assert paid is not None
        assert text == 3 * text[:32] + "a"
        assert shared.effects(key) == {key: 1, f"{key}/a": 1}

    def test_a_duplicate_in_a_chain_completes_it(self, shared, key):
        pay, say = shared.app.tasks["pay_once"], Say(shared, key)
        first = shared.publish("pay_once", key).get(timeout=PATIENCE)
        result: AsyncResult[Any] = chain(pay.si(key), say("a"), pay.si(key), say("b")).apply_async()
        assert result.get(timeout=PATIENCE) == f"{first}b"
        shared.idle(key)
        assert shared.effects(key) == {key: 1, f"{key}/a": 1, f"{key}/b": 1}

    def test_a_duplicate_that_crashes_before_it_sends_completes_its_chain(self, on_redis, key):
        """Nothing is settled by the duplicate: it is the record's own task alone that is answered silently."""
        pay, say = on_redis.app.tasks["pay_once"], Say(on_redis, key)
        chain(pay.si(key), say("a")).apply_async().get(timeout=PATIENCE)
        on_redis.idle(key)
        result: Any = chain(pay.si(key), say("b")).apply_async()
        assert result.get(timeout=PATIENCE).endswith("b")
        on_redis.idle(key)
        on_redis.deliver_again(on_redis.receipt(result.parent.id))
        on_redis.idle(key)
        assert on_redis.effects(key) == {key: 1, f"{key}/a": 1, f"{key}/b": 1}


class TestItems:
    """``map``, ``starmap`` and ``chunks`` call the task as a function, for each item."""

    def test_items_of_a_redelivered_message_run_again(self, on_redis, key):
        """As with Celery: the message is that of Celery's own task, and its items are plain calls."""
        result = on_redis.app.tasks["item"].map([f"{key}/a"]).apply_async()
        result.get(timeout=PATIENCE)
        on_redis.idle(key)
        on_redis.deliver_again(on_redis.receipt(result.id))
        on_redis.idle(key)
        assert on_redis.effects(key) == {f"{key}/a": 2}
