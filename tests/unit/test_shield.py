"""A signal strikes in the body, and nowhere else: all over a run, each in a child of its own."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_idempotent import backoff, signals
from celery_idempotent.celery import delivery
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol import shield
from celery_idempotent.protocol.claim import current_claim
from celery_idempotent.records import State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.runs import IDENTITY, Ran
from tests.support.tiers import examples
from tests.support.workers import in_child
from tests.unit.test_runner import FlakyStore, a_call, make_runner

#: A run is struck at each so many instructions, from a place that is another each time.
STEP = examples(83, 41)


class LimitError(Exception):
    """The soft time limit."""


def forgetful() -> FlakyStore:
    """Return a store of which the first answer to each verb is lost."""
    store = FlakyStore(MemoryStore())
    for verb in ("claim", "settle", "release"):
        store.fail(verb, StoreUnavailable, when="after")
    return store


def strike_one(number: int, signum: int, store: Any) -> str:
    """Say what became of a run whose ``number``-th instruction a signal strikes."""
    effects, seen, struck = list[str](), 0, ""
    backoff.seconds = lambda *_, **__: 0.0
    for each in vars(signals).values():
        if isinstance(each, Signal):
            each.receivers = []  # those of other tests of this process, whose instructions are not ours

    def limit(*_: object) -> None:
        raise LimitError if signum == signal.SIGUSR1 else SystemExit

    def body() -> str:
        effects.append("effect")
        return "value"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen, struck
        if frame.f_code.co_filename == __file__ and frame.f_code is not body.__code__:
            return None
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if event == "opcode" and seen == number:
            struck = f"{frame.f_code.co_name}:{frame.f_lineno}"
            handler: Any = signal.getsignal(signum)
            handler(signum, frame)  # what it raises is raised in that frame
        return trace

    signal.signal(signum, limit)
    shield.shields[threading.get_ident()] = held = shield.Shield()
    held.hold(signum)
    runner = make_runner(store)
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        answer = runner.execute(a_call(), body)
        outcome = "value" if answer == Ran("value") else repr(answer)
    except (LimitError, SystemExit) as error:
        outcome = type(error).__name__
    finally:
        sys.settrace(None)
    if not struck:
        return "over"
    record = store.get(IDENTITY)
    state = None if record is None else record.state
    completed = bool(effects) and state is State.COMPLETED
    free = not effects and state is None and outcome != "value"
    in_body = struck.startswith("body:") and state is None  # its exception: released
    right = (completed or free or in_body) and current_claim() is None
    return "ok" if right else f"{struck}: {len(effects)} effects, {state}, {outcome}"


# SIGTERM leaves a verb one try more: if the store loses that, too, the lease ends the claim.
@pytest.mark.parametrize(
    ("signum", "kind"),
    [(signal.SIGUSR1, MemoryStore), (signal.SIGTERM, MemoryStore), (signal.SIGUSR1, forgetful)],
)
def test_what_took_effect_is_completed_and_what_did_not_is_free(
    signum: int, kind: Callable[[], Any]
) -> None:
    wrong, number = [], 1 + random.randrange(STEP)  # the first instruction is number 1
    while (said := in_child(lambda: strike_one(number, signum, kind()))) != "over":  # noqa: B023
        if said != "ok":
            wrong.append(said)
        number += STEP
    assert number > 500, "the striker does not strike"
    assert wrong == []


def make(received: list[int]) -> shield.Shield:
    made = shield.Shield()
    made._handlers = {n: lambda n, _: received.append(n) for n in (signal.SIGUSR1, signal.SIGTERM)}
    return made


@pytest.mark.parametrize(
    ("over", "raised"), [("id", [signal.SIGTERM]), (None, [signal.SIGUSR1, signal.SIGTERM])]
)
def test_a_soft_limit_is_dropped_once_its_run_is_over_not_once_an_inner_one_is(over, raised):
    received: list[int] = []
    made = make(received)
    made.closed = True
    made._handle(signal.SIGUSR1, None)
    made._handle(signal.SIGTERM, None)
    made.leave(was_closed=False, over=over)
    assert received == raised


def test_a_signal_ends_a_wait_for_the_store_and_a_pause_once():
    made = make([])
    made.closed = made.waiting = True
    with pytest.raises(shield.VerbInterruptedError):
        made._handle(signal.SIGUSR1, None)
    made._handle(signal.SIGUSR1, None)  # the verb is not under way any more
    assert made.pause(0.01), "a signal that came before does not end it"


def test_a_process_that_ends_is_left_the_second_try_of_its_verb():
    made = make([])
    made.closed = made.waiting = True
    with pytest.raises(shield.VerbInterruptedError):
        made._handle(signal.SIGTERM, None)
    made.waiting = True
    made._handle(signal.SIGTERM, None)
    made._handle(signal.SIGUSR1, None)
    assert made.waiting


def test_a_task_that_runs_again_in_its_process_has_its_limit_until_it_has_run(monkeypatch):
    received: list[int] = []
    made = make(received)
    made._current = lambda: a_call().task_id
    monkeypatch.setitem(shield.shields, threading.get_ident(), made)
    for times in (1, 2):
        runner = make_runner(MemoryStore())
        runner.execute(a_call(), lambda: made._handle(signal.SIGUSR1, None))
        made._handle(signal.SIGUSR1, None)  # Celery stores its result
        assert received == [signal.SIGUSR1] * times


def install_struck(number: int) -> str:
    """Say what is missing once a signal struck the ``number``-th instruction of the first installation."""
    seen = 0

    def limit(*_: object) -> None:
        raise LimitError

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_globals.get("__name__") not in (shield.__name__, delivery.__name__):
            return None
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if event == "opcode" and seen == number:
            handler: Any = signal.getsignal(signal.SIGUSR1)
            handler(signal.SIGUSR1, frame)
        return trace

    limit.__module__ = "billiard.pool"
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, limit)
    sys.settrace(trace)
    with suppress(LimitError):
        delivery._prepare_process(os.getpid())
    sys.settrace(None)
    delivery._prepare_process(os.getpid())
    held = shield.shields.get(threading.get_ident(), shield.NO_SHIELD)
    missing = [n for n in (signal.SIGUSR1, signal.SIGTERM) if signal.getsignal(n) != held._handle]
    return f"{number}: {missing}" if missing else "ok" if seen >= number else "over"


def test_a_signal_that_strikes_its_installation_does_not_keep_it_from_being_installed():
    said, number = "ok", 0
    while said == "ok":
        number += 7
        said = in_child(lambda: install_struck(number))  # noqa: B023
    assert said == "over"
    assert number > 50, "the striker does not strike"
