"""Whatever fails between the end of a body and its ack: callbacks are sent, and a body runs once.

Each test sends canvases at once, whose followers a worker of real processes has to publish: a link, the next step of a
chain, an errback. The body of a chord and a replacement are Celery's to publish, and a refusal is their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from celery import chain, chord
from celery.exceptions import ChordError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from celery_idempotent import State
from tests.delivery.histories_app import POINTS
from tests.delivery.stand import PATIENCE, Stand, open_stand
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture(scope="module", params=[REDIS, RABBITMQ_TOO])
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    """A worker of five processes."""
    rabbitmq = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    directory = tmp_path_factory.mktemp("sending")
    with open_stand(request.param, directory, rabbitmq, concurrency=5) as stand:
        yield stand
        stand.proxy.heal()


@dataclass
class Sent:
    """A canvas at work: ``first`` is the label of who has to send, ``follower`` of what is sent."""

    result: AsyncResult[Any]
    first: str
    follower: str
    #: The task that has to send, and how it ends.
    sender: AsyncResult[Any]
    state: str = "SUCCESS"
    others: tuple[str, ...] = ()

    def labels(self) -> tuple[str, ...]:
        return (self.first, *self.others, self.follower)


def parent(result: Any) -> Any:
    return result.parent


class Canvases:
    """Makes them: followers go to ``queue``, senders acknowledge as ``acks`` says, and wait at gates if ``gated``."""

    def __init__(
        self, stand: Stand, acks: str = "late", queue: str | None = None, *, gated: bool = False
    ) -> None:
        self.stand = stand
        self.suffix = "_early" if acks == "early" else ""
        self.options = {"queue": queue} if queue else {}
        self.queue = queue or stand.conf["task_default_queue"]
        self.gated = gated

    def _first(self, task: str) -> tuple[str, Any]:
        key = self.stand.label()
        if self.gated:
            self.stand.close_gate(f"{key}/a")
        return key, self.stand.step(f"{key}/a", name=f"{task}{self.suffix}")

    def link(self) -> Sent:
        key, first = self._first("step")
        first.link(self.stand.step(f"{key}/b", **self.options))
        result = first.apply_async()
        return Sent(result, f"{key}/a", f"{key}/b", result)

    def chain(self) -> Sent:
        key, first = self._first("step")
        result = chain(first, self.stand.step(f"{key}/b", **self.options)).apply_async()
        return Sent(result, f"{key}/a", f"{key}/b", parent(result))

    def errback(self) -> Sent:
        key, first = self._first("refuse")
        first.link_error(self.stand.mourn(f"{key}/b", **self.options))
        result = first.apply_async()
        return Sent(result, f"{key}/a", f"{key}/b", result, "FAILURE")

    def body(self) -> Sent:
        return self._chord("step", "c", "SUCCESS")

    def errback_of_a_body(self) -> Sent:
        return self._chord("refuse", "d", "FAILURE")

    def _chord(self, last_part: str, follower: str, state: str) -> Sent:
        key, first = self._first(last_part)
        self.stand.close_gate(f"{key}/a")
        other = self.stand.step(f"{key}/b", name=f"step{self.suffix}")
        body = self.stand.step(f"{key}/c", **self.options)
        if follower == "d":
            body.link_error(self.stand.mourn(f"{key}/d", **self.options))
        result = chord([first, other], body, app=self.stand.app).apply_async()
        last, before = parent(result).results
        wait_for(lambda: before.state == "SUCCESS", PATIENCE, "the other part")
        if not self.gated:
            self.stand.open_gate(f"{key}/a")
        return Sent(result, f"{key}/a", f"{key}/{follower}", last, state, (f"{key}/b",))

    def replacement(self) -> Sent:
        key, _ = self._first("swap")
        swap = self.stand.app.tasks[f"swap{self.suffix}"]
        result = swap.apply_async((f"{key}/a", self.queue))
        return Sent(result, f"{key}/a", f"{key}/a'", result)

    def all(self) -> dict[str, Sent]:
        """One of each that comes back."""
        return {"link": self.link(), "chain": self.chain(), "errback": self.errback()}


def ends(stand: Stand, each: Sent, *, refused: bool = False) -> None:
    """The sender ends as it has to. Signals reported a failure before only if something was ``refused``."""
    wait_for(
        lambda: each.sender.state in ("SUCCESS", "FAILURE"),
        PATIENCE,
        lambda: f"{each.sender.state}\n{stand.worker.tail()}",
    )
    assert each.sender.state == each.state
    if each.state == "SUCCESS":
        assert refused or stand.failures(each.sender) == 0
        assert stand.record(each.sender).state is State.COMPLETED


ACKS = pytest.mark.parametrize("acks", ["late", "early"])


@ACKS
def test_a_follower_that_the_broker_refuses_is_sent_when_it_is_taken(stand, acks):
    since = len(stand.worker.log)
    with stand.refused() as queue:
        sent = Canvases(stand, acks, queue).all()
        for name, each in sent.items():
            stand.says(f"[{each.sender.id}] is done, its callbacks are not all sent yet", since)
            assert stand.effects(each.first) == {each.first: 1}, name
            assert each.sender.state == ("FAILURE" if each.state == "FAILURE" else "PENDING"), name
    assert len(stand.arrived(queue, len(sent))) == len(sent)
    for each in sent.values():
        ends(stand, each, refused=True)
        assert stand.effects(each.first) == {each.first: 1}


def test_what_was_sent_beside_what_was_refused_is_sent_again_and_takes_effect_once(stand):
    since = len(stand.worker.log)
    key = stand.label()
    with stand.refused() as queue:
        first = stand.step(f"{key}/a")
        first.link(stand.step(f"{key}/b"))
        first.link(chain(stand.step(f"{key}/c"), stand.step(f"{key}/d")))
        first.link(stand.step(f"{key}/e", queue=queue))
        result = first.apply_async()
        stand.says(f"[{result.id}] is done, its callbacks are not all sent yet", since)
    assert len(stand.arrived(queue)) == 1
    assert result.get(timeout=PATIENCE) == "a"
    stand.takes_effect(*(f"{key}/{each}" for each in "abcd"))


@pytest.mark.parametrize("shape", ["body", "errback_of_a_body"])
def test_a_body_that_the_broker_refuses_is_the_end_of_its_chord(stand, shape):
    """So is an errback of the body: Celery notes its own error, and sends no more."""
    refusal = OperationalError if stand.broker == "redis" else PreconditionFailed
    error = ChordError if shape == "body" else refusal
    with stand.refused() as queue:
        each = getattr(Canvases(stand, queue=queue), shape)()
        wait_for(each.result.ready, PATIENCE, "the end of the chord")
        assert isinstance(each.result.result, error)
    ends(stand, each)
    wait_for(lambda: not stand.waiting(), PATIENCE, "the end of the last part")
    assert stand.record(each.sender).delivered
    assert stand.effects(each.first.split("/")[0]).keys() == {each.first, *each.others}


def test_a_replacement_that_the_broker_refuses_fails_its_task_and_frees_its_key(stand):
    with stand.refused() as queue:
        each = Canvases(stand, queue=queue).replacement()
        with pytest.raises(Exception, match=r"."):
            each.result.get(timeout=PATIENCE)
    assert each.sender.state == "FAILURE"
    assert stand.effects(each.first) == {each.first: 1}
    assert stand.find("swap", each.sender) is None


@pytest.mark.parametrize(("point", "runs"), [("sending", {2}), ("sent", {1, 2}), ("settled", {1})])
def test_a_process_that_dies_before_its_replacement_is_recorded_repeats_the_body_alone(
    stand, point, runs
):
    each = Canvases(stand, gated=True).replacement()
    stand.crash(point, each.first)
    stand.open_gate(each.first)
    assert each.result.get(timeout=PATIENCE).endswith("'")
    wait_for(lambda: stand.crashed(point, each.first), PATIENCE, "the crash")
    wait_for(lambda: not stand.waiting(), PATIENCE, "the redelivery")
    # Celery takes the result of the replacement, which has the same id, for that of a lost task.
    effects = stand.effects(each.first)
    assert effects[each.first] in runs
    assert effects[each.follower] == 1


def test_a_follower_that_can_never_be_sent_ends_the_task_as_a_failure_that_is_told(stand):
    """Nobody knows its serializer: the record stays what it is, and nothing circles."""
    since = len(stand.worker.log)
    key = stand.label()
    first = stand.step(f"{key}/a")
    first.link(stand.step(f"{key}/b", serializer="no such thing"))
    first.link_error(stand.mourn(f"{key}/c"))
    result = first.apply_async()
    with pytest.raises(Exception, match="no such thing"):
        result.get(timeout=PATIENCE)
    stand.takes_effect(f"{key}/a", f"{key}/c")
    record = stand.record(result)
    assert (record.state, record.delivered) == (State.COMPLETED, False)
    stand.says(f"[{result.id}] is done, but its callbacks cannot be sent", since)
    assert (
        f"[{result.id}] is done, its callbacks are not all sent yet" not in stand.worker.log[since:]
    )


def test_a_follower_that_is_refused_for_too_long_ends_the_task_as_a_failure_that_is_told(stand):
    """The message comes back while its record surely answers it: for half of the retention, which is short here."""
    since = len(stand.worker.log)
    key = stand.label()
    with stand.refused() as queue:
        result = chain(
            stand.step(f"{key}/a", name="brief"), stand.step(f"{key}/b", queue=queue)
        ).apply_async()
        first = parent(result)
        wait_for(lambda: first.state == "FAILURE", PATIENCE, lambda: first.state)
    stand.says(f"[{first.id}] is done, its callbacks are not all sent yet", since)
    stand.says(f"[{first.id}] is done, but its callbacks cannot be sent", since)
    assert stand.effects(key) == {f"{key}/a": 1}


@ACKS
def test_followers_are_sent_when_a_broker_that_went_away_is_back_if_acks_are_late(stand, acks):
    since = len(stand.worker.log)
    sent = Canvases(stand, acks, gated=True).all()
    for each in sent.values():
        wait_for(lambda each=each: stand.effects(each.first), PATIENCE, f"{each.first} to start")
    stand.proxy.refuse()
    for each in sent.values():
        stand.open_gate(each.first)
    lines = {"late": "callbacks are not all sent yet", "early": "callbacks cannot be sent"}
    for each in sent.values():
        stand.says(f"[{each.sender.id}] is done, ", since)
    stand.says(lines[acks], since)
    stand.proxy.heal()
    for each in sent.values():
        if acks == "late":
            stand.takes_effect(*each.labels())
            ends(stand, each, refused=True)
        else:  # the broker has no message that could come back
            wait_for(lambda each=each: each.sender.state == "FAILURE", PATIENCE, "the failure")
            assert stand.effects(each.first) == {each.first: 1}


@pytest.mark.parametrize(
    "shape",
    [
        *("chain", "body"),
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("link", "errback")),
    ],
)
def test_a_follower_whose_publishing_the_broker_did_not_answer_takes_effect_once(stand, shape):
    each = getattr(Canvases(stand, gated=True), shape)()
    wait_for(lambda: stand.effects(each.first), PATIENCE, "the sender to start")
    swallowed = stand.proxy.swallowed
    stand.proxy.swallow_replies(b"LPUSH" if stand.broker == "redis" else each.follower.encode())
    stand.open_gate(each.first)
    wait_for(lambda: stand.proxy.swallowed > swallowed, PATIENCE, "an answer to be lost")
    stand.takes_effect(*each.labels())
    ends(stand, each)


@pytest.mark.parametrize("point", POINTS)
def test_what_a_process_that_dies_has_not_sent_is_sent_by_the_next(stand, point):
    canvases = Canvases(stand, gated=True)
    # Only a part of a chord is more than a result.
    sent = {"body": canvases.body(), "errback of a body": canvases.errback_of_a_body()}
    if point != "stored":
        sent |= canvases.all()
    for each in sent.values():
        stand.crash(point, each.first)
    for each in sent.values():
        stand.open_gate(each.first)
    for name, each in sent.items():
        stand.takes_effect(*each.labels())
        wait_for(
            lambda each=each: stand.crashed(point, each.first), PATIENCE, f"the crash of {name}"
        )
        ends(stand, each)


@pytest.mark.parametrize("shape", ["body", "errback_of_a_body"])
def test_a_chord_ends_although_two_processes_die_with_its_last_part(stand, shape):
    """The second one may hold the claim of the chord when the message comes back again, as the first one did."""
    each = getattr(Canvases(stand, gated=True), shape)()
    stand.crash("sending", each.first)
    stand.open_gate(each.first)
    wait_for(lambda: stand.crashed("sending", each.first), PATIENCE, "the first crash")
    stand.crash("sending", each.first)
    stand.takes_effect(*each.labels())
    ends(stand, each)
    assert stand.ledger.count("crash", f"sending {each.first}") == 2


@pytest.mark.parametrize("pool", ["prefork", pytest.param("solo", marks=pytest.mark.wide)])
def test_the_next_step_is_sent_by_a_broker_that_was_killed_at_work_and_is_back(
    tmp_path, databases, pool
):
    """Redis with its log of all changes; records and results are elsewhere, and were never away."""
    conf = {
        "idempotency_store": next(databases),
        "result_backend": f"tests.delivery.histories_app:Backend+{next(databases)}",
    }
    with open_stand("redis", tmp_path, None, pool=pool, concurrency=1, **conf) as stand:
        since = len(stand.worker.log)
        each = Canvases(stand, gated=True).chain()
        wait_for(lambda: stand.effects(each.first), PATIENCE, "the step to start")
        stand.server.kill()
        stand.open_gate(each.first)
        stand.says(f"[{each.sender.id}] is done, its callbacks are not all sent yet", since)
        assert stand.record(each.sender).state is State.COMPLETED
        stand.server.start()
        stand.takes_effect(*each.labels())
        ends(stand, each, refused=True)
