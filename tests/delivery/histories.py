"""Every history of a delivery, from the end of its body to its ack, as data: what is sent, what goes wrong, where.

::

    body → settling → settled → sending → sent → storing → stored → marking → acking
                                └ link, next step, body of a chord, errback, replacement

A history is one shape, one fault at one point, one way to acknowledge and one way to call. ``ending`` says what each
must come to; ``play`` brings it about on a :class:`~tests.delivery.stand.Stand`, and counts effects from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from celery import chain, chord
from celery.exceptions import ChordError
from celery.result import AsyncResult

from celery_idempotent import State
from celery_idempotent.http import enqueue
from tests.delivery.driving import Stage, Steps, drive
from tests.delivery.histories_app import POINTS
from tests.delivery.stand import Stand

#: What a step has to send, and where it passes on its way.
SHAPES = {
    "alone": ("body", "settling", "settled", "storing", "acking"),
    **dict.fromkeys(("link", "chain", "errback"), tuple(p for p in POINTS if p != "stored")),
    **dict.fromkeys(("body", "errback of a body"), POINTS),
    "replacement": ("body", "sending", "sent", "settling", "settled", "acking"),
}
#: Sent by the task as it ends; the body of a chord and a replacement are Celery's to send, and a refusal is their end.
SENT_AGAIN = ("link", "chain", "errback")
#: How a call is made: what a client's request can bring is one message.
WAYS = {
    "call": tuple(SHAPES),
    "enqueue": ("alone", "link", "errback"),
    "outbox": ("alone", "link", "errback"),
}
#: What strikes one process at a point, and what is done to the broker or the store meanwhile.
STRIKES = {"dies": "dies", "dies twice": "dies", "soft limit": "soft limit", "redelivered": "holds"}
OUTSIDE = {
    "refused": ("sending",),
    "away": ("sending",),
    "answer lost": ("settling", "sending", "marking"),
}


@dataclass(frozen=True)
class History:
    shape: str
    point: str
    fault: str
    acks: str = "late"
    way: str = "call"

    def __str__(self) -> str:
        words = (self.shape, self.point, self.fault, self.acks, self.way)
        return "-".join(word.replace(" ", "_") for word in words)

    @property
    def fails(self) -> bool:
        """Does the sender fail for good, without any fault?"""
        return self.shape.startswith("errback")

    @property
    def cell(self) -> str:
        """The letter of its cell in the table *Callbacks are sent* of guarantees.md."""
        kind = {"replacement": 2, "body": 1, "errback of a body": 1}.get(self.shape, 0)
        match self.fault, self.point:
            case "soft limit", _:
                return "n"
            case "redelivered", _:
                return "o"
            case "answer lost", _:
                return "e" if self.point == "sending" else "l"
            case (("dies" | "dies twice"), ("sending" | "sent")):
                return "bbh"[kind]
            case "dies", _:
                return _DIES[self.point]
        return ("c" if self.fault == "refused" else "d", "g", "i")[kind]


_DIES = {
    "body": "m",
    "settling": "m",
    "settled": "a",
    "storing": "f",
    "stored": "f",
    "marking": "j",
    "acking": "k",
}


def histories() -> Iterator[History]:
    """Yield all that there are."""
    for way, shapes in WAYS.items():
        for shape, acks in itertools.product(shapes, ("late", "early")):
            for point, fault in itertools.product(
                SHAPES[shape], ("dies", "soft limit", "redelivered")
            ):
                yield History(shape, point, fault, acks, way)
            for fault, points in OUTSIDE.items():
                for point in points:
                    # A database has no proxy here.
                    if point in SHAPES[shape] and (way != "outbox" or point == "sending"):
                        yield History(shape, point, fault, acks, way)
    for shape in ("body", "errback of a body"):
        yield History(shape, "sending", "dies twice")


@dataclass(frozen=True)
class Ending:
    """What a history comes to: how often the body ran, how the task ended, how often the follower took effect."""

    state: str
    runs: tuple[int, ...] = (1,)
    follower: tuple[int, ...] = (1,)
    #: Is the record there, and marked as delivered?
    record: bool = True
    marked: bool = True


def ending(each: History) -> Ending:
    """Return what the documentation promises of a history."""
    usual = Ending("FAILURE" if each.fails else "SUCCESS")
    never = (1,) if each.fails else (0,)
    unsettled = each.point in ("body", "settling")
    match each.fault, each.acks:
        case "soft limit", _ if each.point == "body":
            # A request has one answer: its task fails for good.
            return Ending("FAILURE", follower=never, record=each.way == "enqueue")
        case "soft limit", _ if each.shape == "replacement" and each.point in ("sending", "sent"):
            # In the body still. What was sent is done, under the task's id.
            return Ending("", follower=(int(each.point == "sent"),), record=False)
        case "dies", "late" if each.shape == "replacement":
            # Celery takes the result of the replacement, which has the same id, for that of a lost task.
            runs = {"body": (2,), "settled": (1,), "acking": (1,)}
            return Ending("SUCCESS", runs=runs.get(each.point, (1, 2)))
        case (("dies" | "dies twice"), "late"):
            # Errbacks of a body have no id that lasts: after a crash they may run twice.
            follower = (1, 2) if each.shape == "errback of a body" else (1,)
            return Ending(usual.state, runs=(2,) if unsettled else (1,), follower=follower)
        case "dies", "early":
            # The message is gone; what was sent by then was sent. But of two processes that die at once Celery takes
            # the task of one for not begun, and runs it again.
            return Ending("", runs=(1, 2), follower=(0, 1), record=False, marked=False)
        case (("refused" | "away"), _) if each.shape == "replacement":
            return Ending("FAILURE", follower=(0,), record=False)
        case (("refused" | "away"), _) if each.shape not in SENT_AGAIN and each.shape != "alone":
            return Ending(usual.state, follower=(0,))
        case "away", "early":
            return Ending("FAILURE", follower=(0,), marked=False)
    return usual


@dataclass
class Sent:
    """A canvas at work: ``first`` is the label of who has to send, ``follower`` of what is sent."""

    first: str
    follower: str
    #: The task that has to send, and what its caller waits for.
    sender: AsyncResult[Any]
    result: AsyncResult[Any]
    #: The name of the sender's task, and its key where its call brought one.
    task: str
    key: str = ""


def send(stand: Stand, each: History, *, queue: str = "", aside: str = "") -> Sent:
    """Send a canvas whose follower goes to ``queue``; with ``aside`` its first message waits there."""
    key = stand.label()
    first, follower = f"{key}/a", f"{key}/b"
    name = {"replacement": "swap"}.get(each.shape, "refuse" if each.fails else "step")
    name += "_early" if each.acks == "early" else ""
    options = {"queue": queue} if queue else {}
    one = stand.step(first, name=name, **({"queue": aside} if aside else {}))
    stand.close_gate(first)
    match each.shape:
        case "link":
            one.link(stand.step(follower, **options))
        case "errback":
            one.link_error(stand.mourn(follower, **options))
        case "chain":
            one = chain(one, stand.step(follower, **options))
        case "replacement":
            follower = f"{first}'"
            one.args = (first, queue or stand.queue)
        case "body" | "errback of a body":
            other = stand.step(f"{key}/o", name=name.replace("refuse", "step"))
            body = stand.step(f"{key}/c" if each.fails else follower, **options)
            if each.fails:
                body.link_error(stand.mourn(follower, **options))
            one = chord([one, other], body, app=stand.app)
    brought = ""
    if each.way == "call":
        result: Any = one.apply_async()
    elif each.way == "outbox":
        from django.db import transaction

        from celery_idempotent.django import outbox

        with transaction.atomic(using=stand.outbox):
            result = stand.result(str(outbox.stage(one, using=stand.outbox)))
    else:
        brought = key
        answer = enqueue(one.type, one.args, key=key, scope="caller", **one.options)
        assert answer.status == 202, answer
        record: Any = one.type.idempotency_record(key, scope="caller")
        result = stand.result(record.task_id)
    sender = result
    if each.shape == "chain" and each.way == "call":
        sender = result.parent
    if each.shape in ("body", "errback of a body"):
        sender = result.parent.results[0]
    return Sent(first, follower, sender, result, name, brought)


@dataclass
class Outage:
    """The one outage of the broker that some histories share: it begins when all of them are in their bodies."""

    stand: Stand
    wanted: int = 0
    ready: int = 0
    met: int = 0
    begun: bool = False
    over: bool = False

    def go_on(self) -> None:
        if not self.begun and self.wanted and self.ready == self.wanted:
            self.stand.to_broker.refuse()
            self.begun = True
        elif self.begun and not self.over and self.met == self.wanted:
            self.stand.to_broker.heal()
            self.over = True


@dataclass
class Played:
    """A history under way; :meth:`steps` yields what it waits for."""

    stand: Stand
    history: History
    outage: Outage | None = None
    sent: Sent | None = None
    error: BaseException | None = None

    def steps(self) -> Steps:
        stand, each = self.stand, self.history
        strike = STRIKES.get(each.fault, "")
        if each.fault == "answer lost" and each.point != "sending":
            strike = "holds"  # until the store's answer is sure to be lost
        queue = stand.new_queue() if each.fault == "refused" else ""
        if queue:
            stand.refuse(queue)
        aside = stand.new_queue() if each.fault == "redelivered" else ""
        self.sent = sent = send(stand, each, queue=queue, aside=aside)
        message = None
        if aside:
            (message,) = stand.take(aside, 1)
            stand.deliver(message)
        yield lambda: stand.effects(sent.first)
        if each.shape in ("body", "errback of a body"):
            other = sent.result.parent.results[1]
            yield lambda: other.state == "SUCCESS"
        outage = self.outage
        if outage is not None:
            outage.ready += 1
            yield lambda: outage.begun
        elif strike:
            stand.plan(strike, each.point, sent.first)
        elif each.fault == "answer lost":
            stand.to_broker.swallow_replies(sent.follower.encode())
        stand.open_gate(sent.first)
        if strike:
            yield lambda: stand.met(strike, each.point, sent.first)
        if each.fault == "dies twice":
            stand.plan(strike, each.point, sent.first)
            yield lambda: stand.met(strike, each.point, sent.first) == 2
        if message is not None:
            before = self._heard()
            stand.deliver(message)
            yield lambda: self._heard() > before or stand.ended(sent.sender)
        elif each.fault == "answer lost" and strike:
            stand.to_store.swallow_replies((sent.key or sent.sender.id).encode())
        if strike == "holds":
            stand.file("on", sent.first).touch()
        if each.fault in ("refused", "away"):
            # The end of a chord is that of its body.
            yield lambda: stand.ended(sent.result) or self._comes_back()
            if outage is not None:
                outage.met += 1
                yield lambda: outage.over
        if queue:
            stand.refuse(queue, refused=False)
            if ending(each).follower == (1,):
                yield lambda: stand.arrived(queue)
        yield from self._comes_to(ending(each), arrived=bool(queue))

    def _comes_to(self, end: Ending, *, arrived: bool) -> Steps:
        stand, each, sent = self.stand, self.history, self.sent
        assert sent is not None
        yield lambda: stand.ended(sent.sender)
        assert not end.state or sent.sender.state == end.state, self.story()
        follows = each.shape != "alone" and not arrived
        if follows and 0 not in end.follower:
            yield lambda: stand.effects(sent.follower)
        if end.record and end.marked and follows and each.shape != "replacement":
            yield lambda: (r := self._record()) is not None and r.delivered
        found = stand.effects(sent.first)
        assert found[sent.first] in end.runs, self.story()
        if follows:
            assert stand.effects(sent.follower).get(sent.follower, 0) in end.follower, self.story()
        record = self._record()
        if end.record and each.shape != "replacement":
            assert record is not None, self.story()
            failed = each.fails or (each.point, each.fault) == ("body", "soft limit")
            assert record.state is (State.FAILED if failed else State.COMPLETED), self.story()
            crashes = found[sent.first] - 1 if each.fault == "dies" else 0
            assert record.crashes == crashes, self.story()
        elif each.fault != "dies":
            assert each.shape == "replacement" or record is None, self.story()
        if each.shape == "body" and end.follower == (0,) and each.fault != "dies":
            yield lambda: stand.ended(sent.result)
            assert isinstance(sent.result.result, ChordError), sent.result.result

    @property
    def ends_well(self) -> bool:
        return ending(self.history).state == "SUCCESS"

    def end(self) -> None:
        if self.sent is not None:
            self.stand.open_gate(self.sent.first)
            self.stand.file("on", self.sent.first).touch()

    def story(self) -> str:
        """Return all that is known of it."""
        if self.sent is None:
            return "nothing was sent"
        key, sender = self.sent.first.split("/")[0], self.sent.sender
        told = [
            (each.phase, each.key or each.task_id, each.pid)
            for each in self.stand.ledger.entries()
            if key in each.key or each.task_id == sender.id
        ]
        lines = [line for line in self.stand.lead.log.splitlines() if sender.id in line]
        return f"{sender.state} {sender.result!r}; {told}; {self._record()}; {lines[-12:]}"

    def _comes_back(self) -> bool:
        assert self.sent is not None
        log = self.stand.lead.log
        return any(
            f"[{self.sent.sender.id}] is done, its callbacks {how}" in log
            for how in ("are not all sent yet", "cannot be sent")
        )

    def _heard(self) -> int:
        assert self.sent is not None
        told = ("conflicted", "replayed")
        return sum(self.stand.ledger.count(each, task_id=self.sent.sender.id) for each in told)

    def _record(self) -> Any:
        assert self.sent is not None
        task: Any = self.stand.app.tasks[self.sent.task]
        if self.sent.key:
            return task.idempotency_record(self.sent.key, scope="caller")
        return self.stand.find(self.sent.task, self.sent.sender.id)


def play(stand: Stand, wanted: Iterable[History], *, at_once: int) -> list[Played]:
    """Play histories, so many at once as the worker has processes; those of an outage after all others."""
    every = list(wanted)
    alone = [Played(stand, each) for each in every if each.fault != "away"]
    drive(Stage(alone, at_once=at_once))
    for acks in ("late", "early"):
        outage = Outage(stand)
        some = [
            Played(stand, each, outage)
            for each in every
            if (each.fault, each.acks) == ("away", acks)
        ]
        outage.wanted = len(some)
        drive(Stage(some, at_once=len(some), between=outage.go_on))
        alone += some
    return alone
