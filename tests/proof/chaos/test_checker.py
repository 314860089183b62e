"""A checker that cannot fail proves nothing: each wrong history is told, and none that a named fault explains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proof.chaos.checker import Checker
from tests.proof.chaos.plan import make

ID = "keyed key k"
UNIT = "keyed k"
CALL = {"what": "call", "kind": "keyed", "key": "k", "units": [UNIT], "first": 0.9, "result": "a"}
KILL = {"what": "strike", "n": 0, "fault": "child killed", "explains": "died"}

END = {"t": 3.0, "what": "ended", "name": "w0", "pids": [7], "code": 1}
MISSED = {"t": 3.1, "what": "missed", "n": 0, "why": "IndexError: no child"}


def verb(t: float, name: str, token: int, pid: int = 7) -> dict[str, Any]:
    about = {"verb": name, "id": ID, "task_id": "a", "pid": pid}
    return {"t": t, "what": "verb", "token": token, **about}


def effect(t: float, token: int) -> dict[str, Any]:
    about = {"unit": UNIT, "id": ID, "task_id": "a", "pid": 7}
    return {"t": t, "what": "effect", "token": token, **about}


def check(*notes: dict[str, Any], broker: str = "rabbitmq", kind: str = "keyed") -> Checker:
    called = [{"t": 1.0, **CALL, "kind": kind}, *notes, {"t": 99.0, "what": "end"}]
    return Checker(called, store="redis", broker=broker, library="ours")


def kill(t: float, pid: int = 7) -> tuple[dict[str, Any], ...]:
    struck = {"t": t, "what": "struck", "n": 0, "hit": [pid]}
    return {"t": t, **KILL}, struck, {"t": t + 0.1, "what": "healed", "n": 0}


ONCE = (verb(2, "claimed", 1), effect(2.1, 1), verb(2.2, "settled", 1))
TWICE = (verb(2, "claimed", 1), effect(2.1, 1), verb(9, "claimed", 2), effect(9.1, 2))


def test_what_runs_once_is_right() -> None:
    found = check(*ONCE)
    assert (found.calls, found.effects, found.verbs.total()) == (1, 1, 2)
    assert found.wrong == found.doubled == found.lost == []


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ((), "lost: keyed k"),
        (TWICE, "doubled: keyed k"),
        (TWICE, "beside one another"),
        ((*ONCE, verb(5, "claimed", 2)), "settled at 1.2 s, and claimed again"),
        ((*ONCE, *kill(4), verb(5, "claimed", 2), effect(5.1, 2)), "doubled: keyed k"),
        ((verb(2, "claimed", 2), verb(3, "released", 2), verb(4, "claimed", 1)), "do not grow"),
        ((*TWICE, *kill(5, pid=8)), "doubled: keyed k"),
        ((*kill(0.5), *TWICE), "beside one another"),
        ((END,), "w0 ended by itself"),
    ],
)
def test_what_no_fault_explains_is_wrong(notes: tuple[dict[str, Any], ...], told: str) -> None:
    assert any(told in each for each in check(*notes).wrong)


def test_a_kill_between_an_effect_and_its_settle_explains_the_second_effect() -> None:
    found = check(*TWICE, *kill(3))
    assert not found.wrong
    assert found.doubled == ["doubled: keyed k at 1.1 s and 8.1 s: child killed at 2.0 s"]


def test_the_first_effect_of_a_frozen_process_may_come_after_the_second() -> None:
    claims = (verb(2, "claimed", 1), verb(9, "claimed", 2, pid=8))
    freeze = ({"t": 2, **KILL, "explains": "frozen"}, kill(2)[1], kill(9.2)[2])
    found = check(*claims, effect(9.1, 2), effect(9.2, 1), *freeze)
    assert not found.wrong
    assert found.doubled


def test_what_the_master_took_that_was_replaced_is_lost() -> None:
    again = (*ONCE, verb(5, "claimed", 2), effect(5.1, 2))
    assert check(*again).wrong
    assert not check(*again, {"t": 1.5, "what": "split", "end": 4.0}).wrong


def test_a_mark_without_retention_ends_when_the_clock_steps_ahead() -> None:
    brief = [{**each, "id": "brief key k"} for each in (*ONCE, verb(4, "claimed", 2))]
    assert check(*brief).wrong
    assert not check(*brief, {"t": 3, **KILL, "explains": "stepped"}).wrong


def test_a_process_that_was_struck_may_claim_until_it_ends() -> None:
    struck = {"t": 0.2, "what": "struck", "n": 0, "hit": [6, 7]}
    end = {"t": 5, "what": "ended", "name": "w0", "pids": [6], "code": 0}
    found = check({"t": 0.1, **KILL}, struck, {"t": 0.3, "what": "healed", "n": 0}, *TWICE, end)
    assert not found.wrong
    assert found.doubled


def test_a_message_that_nobody_claimed_may_be_lost_on_redis_alone() -> None:
    assert check(*kill(3), broker="redis").lost
    assert check(*kill(3)).wrong
    assert check({"t": 3, **KILL}, MISSED, broker="redis").wrong


def test_a_retry_that_the_broker_does_not_take_is_sent_after_the_release() -> None:
    notes = verb(2, "claimed", 1), verb(2.1, "released", 1)
    for frozen, explained in ((2.2, True), (5, False)):
        broker = {"t": frozen, **KILL, "explains": "broker"}, {"t": 9, "what": "healed", "n": 0}
        found = check(*notes, *broker, kind="retrying")
        assert (bool(found.lost), bool(found.wrong)) == (explained, not explained)


def test_an_atomic_run_that_lost_its_session_gives_its_key_back_and_no_effect() -> None:
    ran = [{**each, "id": "atomic key k"} for each in TWICE]
    away = {"t": 3, **KILL, "explains": "away"}, {"t": 4, "what": "healed", "n": 0}
    claims = [each for each in ran if each["what"] == "verb"]
    assert any("beside" in each for each in check(*claims).wrong)
    assert not any("beside" in each for each in check(*claims, *away).wrong)
    assert any("doubled" in each for each in check(*ran, *away).wrong)


def test_a_seed_makes_the_same_plan() -> None:
    one, same, other = (make(seed, 30, 20, "redis", "redis") for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    assert len({each.fault.name for each in make(1, 300, 1, "redis", "redis").strikes}) > 20
