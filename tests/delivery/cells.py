"""One cell of the matrix: a task with a policy and acks, on a broker, in one situation; and the driving of many."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.delivery.app import task_name
from tests.delivery.driving import Steps
from tests.delivery.duplicates import Row, row
from tests.delivery.watched import Site
from tests.support.sites import Message

#: The event that tells of a state.
EVENTS = {
    "STARTED": "started",
    "RETRY": "retried",
    "SUCCESS": "succeeded",
    "FAILURE": "failed",
}

Scenario = Callable[["Cell"], Steps]


def first_seen(words: Iterable[str], beside: Container[str] = ()) -> list[str]:
    """Return each word once, in the order of its first appearance, but those that stand ``beside``."""
    return [each for each in dict.fromkeys(words) if each not in beside]


@dataclass
class Cell:
    """One cell; its scenario yields what it waits for."""

    site: Site
    scenario: Scenario
    policy: str
    acks: str
    directory: Path
    error: BaseException | None = None
    #: How many messages were put into the broker, by task id: published, delivered again, given back, retried.
    copies: dict[str, int] = field(default_factory=dict)
    #: What was shown, to be looked at again when everything is over.
    _shown: list[Callable[[], None]] = field(default_factory=list)
    #: Duplicates that met a holder and did not come back.
    _let_go: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.site.broker}-{self.acks}-{self.policy}-{self.scenario.__name__}"

    @property
    def key(self) -> str:
        return f"key.{self.name}"

    @property
    def task(self) -> Any:
        return self.site.app.tasks[task_name(self.policy, self.acks)]

    @property
    def dropped(self) -> bool:
        """Does the policy let go of a duplicate while the first run is at work?"""
        return self.policy in ("ignore", "raise")

    def steps(self) -> Steps:
        return self.scenario(self)

    # -- doing ---------------------------------------------------------------------------------------------------------

    @property
    def gate(self) -> str:
        return str(self.directory / f"gate.{self.name}")

    def end(self) -> None:
        Path(self.gate).touch()

    def arguments(
        self, mood: str = "", seconds: float = 0, gate: str | None = None
    ) -> tuple[Any, ...]:
        return (self.key, seconds, self.gate if gate is None else gate, mood)

    def publish(self, *arguments: Any) -> str:
        """Publish a call with the cell's key; return its task id."""
        task_id: str = self.task.apply_async(arguments or self.arguments()).id
        self.copies[task_id] = 1
        return task_id

    def message(self) -> Message:
        """Make a message of such a call, and keep it."""
        message = self.site.message(str(self.task.name), *self.arguments())
        self.copies[message.task_id] = 0
        return message

    def deliver(self, message: Message) -> None:
        self.site.deliver(message)
        self.copies[message.task_id] = self.copies.get(message.task_id, 0) + 1

    def other(self) -> Any:
        """Return a signature of such a call with another key."""
        return self.task.si(f"{self.key}.other")

    def after(self) -> Any:
        return self.site.app.tasks["after"].s(self.key)

    def collect(self) -> Any:
        return self.site.app.tasks["collect"].s(self.key)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def runs(self, count: int) -> Callable[[], Any]:
        return lambda: self.site.ledger.count("start", self.key) >= count

    def met(self, task_id: str, *, same: bool = False) -> Callable[[], Any]:
        """Wait until a duplicate has met the holder of its key, as far as its policy lets others see that."""
        if self.policy == "wait":
            return lambda: self.events(task_id).count("started") >= 1 + same
        if same:
            return lambda: self.conflicts(task_id)
        if self.policy == "retry":
            return lambda: "RETRY" in self.stored(task_id) and self.saw(task_id, "retried")
        if self.policy == "ignore":
            return lambda: "IGNORED" in self.stored(task_id) and self.saw(task_id, "started")
        return partial(self.saw, task_id, "failed")

    def saw(self, task_id: str, event: str, count: int = 1) -> bool:
        return self.events(task_id).count(event) >= count

    def ended(self, *task_ids: str) -> Callable[[], Any]:
        """Wait until these are done: by their events, and by what is stored (an ignored task ends without an event)."""
        ends, states = {"succeeded", "failed"}, {"SUCCESS", "FAILURE"}
        return lambda: all(
            (ends & set(self.events(each)) and states & set(self.stored(each)))
            or ("IGNORED" in self.stored(each) and self.saw(each, "started"))
            for each in task_ids
        )

    # -- looking -------------------------------------------------------------------------------------------------------

    def events(self, task_id: str) -> list[str]:
        events: list[str] = self.site.onlooker.events(task_id)
        return events

    def stored(self, task_id: str) -> list[str]:
        stored: list[str] = self.site.onlooker.stored(task_id)
        return stored

    def conflicts(self, task_id: str) -> int:
        return self.site.ledger.count("conflicted", task_id=task_id)

    def effects(self) -> int:
        return self.site.ledger.count("end", self.key)

    def starts(self) -> int:
        return self.site.ledger.count("start", self.key)

    def value(self, task_id: str) -> dict[str, Any]:
        """Return the value of a task that succeeded."""
        result = self.site.result(task_id)
        assert result.state == "SUCCESS", (result.state, result.result)
        value: Any = result.result
        assert value, "SUCCESS with nothing"
        assert value["run"]
        return dict(value)

    def story(self) -> str:
        """Return all that is known of this cell, for a failure."""
        ledger = [
            (each.phase, each.task_id, each.pid, each.time)
            for each in self.site.ledger.entries()
            if self.key in each.key or each.task_id in self.copies
        ]
        shown = {each: (self.stored(each), self.events(each)) for each in self.copies}
        return f"ledger: {ledger}; shown: {shown}; copies: {self.copies}"

    def documented(self, heading: str) -> Row:
        return row(heading, self.policy, self.acks)

    def shows(self, heading: str, task_id: str, *, may_retry: bool = False) -> Row:
        """Hold a duplicate to its row in the documentation, now, and when everything is over.

        ``may_retry``: whether it went round as well is a matter of time.
        """
        found = self.documented(heading)
        beside = {"RETRY", "retried"} if may_retry else set()

        def look() -> None:
            states, events = self.stored(task_id), self.events(task_id)
            assert first_seen(states, beside) == found.words["AsyncResult"], states
            assert self.site.result(task_id).state == found.words["AsyncResult"][-1]
            if "log" in found.words:
                shown = [EVENTS[each] for each in found.words["AsyncResult"] if each in EVENTS]
                assert first_seen(events, beside) == ["received", *shown], events
                self._flower(task_id, shown[-1])
            for phrase in found.words.get("log", ()):
                assert self.site.logged(task_id, phrase), (
                    f"no {phrase!r} about {task_id} in the log"
                )

        look()
        self._shown.append(look)
        if self.dropped and self.conflicts(task_id) and self.stored(task_id)[-1] != "SUCCESS":
            self._let_go.add(task_id)
        return found

    def _flower(self, task_id: str, last: str) -> None:
        states = {"succeeded": "SUCCESS", "failed": "FAILURE"}
        shown, events = self.site.onlooker.shown(task_id).state, self.events(task_id)
        # Of two copies after a crash, one may tell that it goes round just after the other was answered, and Celery's
        # State takes that for the latest news.
        if events[-1] == "retried" and last in events:
            assert shown == "RETRY"
        else:
            assert shown == states.get(last, last.upper())

    def shown_still(self) -> None:
        """Look again, and count: each message that arrived was put into the broker once.

        By us, by a conflict, or because its chord was being finished by another copy.
        """
        for look in self._shown:
            look()
        for task_id, copies in self.copies.items():
            received = self.events(task_id).count("received")
            rounds = self.conflicts(task_id) - (task_id in self._let_go)
            rounds += self.site.ledger.count("undelivered", task_id=task_id)
            assert received == copies + rounds, (task_id, received, copies, rounds)
        assert self.effects() <= 1
