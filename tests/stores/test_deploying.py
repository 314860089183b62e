"""Two versions of an app side by side, the later of which has other keys: every operation still runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from celery_idempotent import IdempotentTask, InvalidOption
from celery_idempotent.records import Identity, State
from celery_idempotent.stores.hybrid.cache import RedisCache
from celery_idempotent.stores.hybrid.store import HybridStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.store import RedisStore
from celery_idempotent.testing import FakeClock
from tests.stores.hybrids import RedisTruth
from tests.support.versions import Version

pytestmark = pytest.mark.redis

#: What a deploy changes: the options before it, and those after it with what makes it harmless.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a finer key": (
        {"idempotency_key": "order"},
        {"idempotency_key": ("order", "kind"), "idempotency_key_before": "order"},
    ),
    "a coarser key": (
        {"idempotency_key": ("order", "kind")},
        {"idempotency_key": "order", "idempotency_key_before": ("order", "kind")},
    ),
    "a scope": (
        {"idempotency_key": "order"},
        {
            "idempotency_key": "order",
            "idempotency_scope": "tenant",
            "idempotency_scope_before": None,
        },
    ),
    "a namespace": (
        {"idempotency_key": "order"},
        {
            "idempotency_key": "order",
            "idempotency_namespace": "payments",
            "idempotency_namespace_before": "charge",
        },
    ),
    "a name": (
        {"idempotency_key": "order"},
        {"name": "pay", "idempotency_key": "order", "idempotency_namespace_before": "charge"},
    ),
    "all of them": (
        {"idempotency_key": "order"},
        {
            "name": "pay",
            "idempotency_key": lambda order, kind, **_: (kind, order),
            "idempotency_scope": "tenant",
            "idempotency_key_before": "order",
            "idempotency_scope_before": None,
            "idempotency_namespace_before": "charge",
        },
    ),
}

Versions = Callable[..., Version]


#: Every change where it is cheap, and all of them at once where it is not.
PLACES = [("memory", change) for change in CHANGES]
PLACES += [("redis", "all of them"), ("hybrid", "all of them")]


@pytest.fixture
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    opened: list[Any] = []

    def open_store(kind: str) -> Any:
        if kind == "memory":
            return MemoryStore()
        url, prefix = (request.getfixturevalue(name) for name in ("redis_url", "prefix"))
        if kind == "redis":
            opened.append(RedisStore(url, prefix=prefix))
        else:
            truth: Any = RedisTruth(url, prefix=f"{prefix}:truth")
            opened.append(HybridStore(RedisCache(url, prefix=prefix), truth))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def versions() -> Iterator[Versions]:
    made: list[Version] = []

    def version(store: Any, **options: Any) -> Version:
        made.append(Version(store, **options))
        return made[-1]

    yield version
    for each in made:
        each.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def version(versions: Versions, store: MemoryStore) -> Versions:
    return partial(versions, store)


@pytest.fixture(params=PLACES, ids="-".join)
def two(
    request: pytest.FixtureRequest, open_store: Callable[[str], Any], versions: Versions
) -> tuple[Version, Version]:
    """The versions before and after the deploy."""
    kind, change = request.param
    store, (old, new) = open_store(kind), CHANGES[change]
    return versions(store, **old), versions(store, **new)


def publishers(before: Version, after: Version, first: str) -> tuple[Version, Version]:
    return (before, after) if first == "before" else (after, before)


@pytest.mark.parametrize("first", ["before", "after"])
@pytest.mark.parametrize("crossed", [False, True])
class TestEveryOperationRunsOnce:
    """``crossed``: each runs the messages that the other one published."""

    def test_what_one_version_did_the_other_does_not_do_again(self, two, first, crossed):
        one, other = publishers(*two, first)
        sent, again = one.publish("o-1"), other.publish("o-1")
        if crossed:
            sent, again = again, sent
        assert one.run(sent) == ("SUCCESS", "receipt")
        assert other.run(again) == ("SUCCESS", "receipt")
        assert one.run(again) == ("SUCCESS", "receipt")
        assert (len(one.runs), other.runs) == (1, [])

    def test_nor_while_it_is_doing_it(self, two, first, crossed):
        one, other = publishers(*two, first)
        sent, again = one.publish("o-1"), other.publish("o-1")
        if crossed:
            sent, again = again, sent
        meanwhile: list[Any] = []

        def does(_: Any) -> str:
            meanwhile.append(other.run(again))
            return "receipt"

        one.does = does
        assert one.run(sent) == ("SUCCESS", "receipt")
        ((word, republished),) = meanwhile
        assert word == "again"
        assert other.run(republished) == ("SUCCESS", "receipt")
        assert (len(one.runs), other.runs) == (1, [])

    def test_what_failed_may_run_again(self, two, first, crossed):
        one, other = publishers(*two, first)
        sent, again = one.publish("o-1"), other.publish("o-1")
        if crossed:
            sent, again = again, sent

        def fails(_: Any) -> None:
            raise ValueError

        one.does = fails
        assert one.run(sent)[0] == "FAILURE"
        assert other.run(again) == ("SUCCESS", "receipt")
        one.does = lambda _: "never"
        assert one.run(sent) == ("SUCCESS", "receipt")

    def test_a_retry_goes_on_in_either(self, two, first, crossed):
        one, other = publishers(*two, first)

        def retries(task: Any) -> None:
            raise task.retry(countdown=0)

        one.does = retries
        word, retry = one.run((other if crossed else one).publish("o-1"))
        assert word == "again"
        assert other.run(retry) == ("SUCCESS", "receipt")
        assert other.run(one.publish("o-1")) == ("SUCCESS", "receipt")
        assert (len(one.runs), len(other.runs)) == (1, 1)

    def test_a_retry_with_other_arguments_is_the_same_operation(self, two, first, crossed):
        """Its key and its fingerprint are those of the first message; a step keeps the record meanwhile."""
        one, other = publishers(*two, first)

        paid: list[str] = []

        def pays(task: Any) -> str:
            task.idempotency.step("pay", lambda: paid.append("once"))
            if not task.request.retries:
                raise task.retry(args=("o-1", "sale", "another tenant"), countdown=0)
            return "receipt"

        one.does = other.does = pays
        word, retry = one.run((other if crossed else one).publish("o-1", "sale"))
        assert word == "again"
        assert other.run(retry) == ("SUCCESS", "receipt")
        assert paid == ["once"]

    def test_a_step_that_one_of_them_did_is_done(self, two, first, crossed):
        """And the outside system knows it by the same key, if the old version has begun it."""
        one, other = publishers(*two, first)
        sent, again = one.publish("o-1"), other.publish("o-1")
        if crossed:
            sent, again = again, sent
        keys: list[str] = []

        def steps(task: Any) -> int:
            keys.append(task.idempotency.derived_key("pay"))
            paid: int = task.idempotency.step("pay", lambda: len(keys))
            if len(keys) == 1:
                raise ValueError
            return paid

        one.does = other.does = steps
        assert one.run(sent)[0] == "FAILURE"
        assert other.run(again) == ("SUCCESS", 1)
        if first == "before":
            assert keys[0] == keys[1]

    def test_a_key_is_published_once(self, version, first, crossed):
        once = {"idempotency_publish_once": True}
        for n, (old, new) in enumerate(CHANGES.values()):
            one, other = publishers(version(**old, **once), version(**new, **once), first)
            again = partial(other.noting, partial(other.task.delay, f"o-{n}"))
            sent = one.publish(f"o-{n}")
            assert again() == []
            assert (other if crossed else one).run(sent) == ("SUCCESS", "receipt")
            assert again() == []


def test_a_reservation_ends_as_its_operation_did_in_a_worker_of_before(version, store):
    """Somebody may ask for its end, by the new identity."""
    old, new = CHANGES["a namespace"]
    before, after = version(**old), version(**new, idempotency_publish_once=True)
    sent = after.publish("o-1")
    assert before.run(sent) == ("SUCCESS", "receipt")
    found = partial(store.get, Identity(namespace="payments", key="o-1"))
    assert found().state is State.QUEUED
    assert after.run(sent) == ("SUCCESS", "receipt")
    assert found().state is State.COMPLETED
    assert after.task.idempotency_record("o-1") == found()
    assert after.task.idempotency_forget("o-1")
    assert after.run(sent) == ("SUCCESS", "receipt")
    assert (len(before.runs), len(after.runs)) == (1, 1)


class TestWhatIsAnotherOperation:
    def test_a_finer_key_runs_what_the_old_one_refused(self, version):
        old, new = CHANGES["a finer key"]
        before, after = version(**old), version(**new)
        before.run(before.publish("o-1", "sale"))
        assert before.run(before.publish("o-1", "refund"))[0] == "FAILURE"
        for kind in ("refund", "sale", "refund", "gift"):
            assert after.run(after.publish("o-1", kind)) == ("SUCCESS", "receipt")
        assert after.runs == [("o-1", "refund"), ("o-1", "gift")]

    @pytest.mark.parametrize("policy", ["retry", "ignore", "raise"])
    @pytest.mark.parametrize("fails", [False, True])
    def test_once_that_has_ended(self, version, fails, policy):
        """Should the sale fail, its old key is free for what a worker of the old version is given, the refund even."""
        old, new = CHANGES["a finer key"]
        before, after = version(**old), version(**new, idempotency_on_conflict=policy)
        refund = after.publish("o-1", "refund")
        meanwhile: list[Any] = []

        def sells(_: Any) -> str:
            meanwhile.append(after.run(refund))
            if fails:
                raise ValueError
            return "receipt"

        before.does = sells
        before.run(before.publish("o-1", "sale"))
        ((word, republished),) = meanwhile
        assert (word, after.runs) == ("again", [])
        after.does = lambda _: before.run(refund)[0]
        before.does = lambda _: "never"
        assert after.run(republished)[0] == "SUCCESS"
        assert (len(before.runs), len(after.runs)) == (1, 1)


class TestAKeyOfItsOwn:
    def test_that_a_task_had_none_before(self, version):
        """A message of the old version goes by its task id, which workers of the old version know."""
        before = version()
        after = version(idempotency_key="order", idempotency_key_before=None)
        sent = before.publish("o-1")
        assert "idempotency" not in sent.headers
        before.run(sent)
        assert after.run(sent) == ("SUCCESS", "receipt")
        again = after.publish("o-2")
        after.run(again)
        assert before.run(again) == ("SUCCESS", "receipt")
        assert (before.runs, after.runs) == ([("o-1", "sale")], [("o-2", "sale")])

    @pytest.mark.parametrize("first", ["before", "after"])
    def test_that_was_given_with_the_call(self, version, first):
        old, new = CHANGES["all of them"]
        one, other = publishers(version(**old), version(**new), first)
        mine = {"idempotency_key": "mine", "idempotency_scope": "s"}
        one.run(one.publish("o-1", **mine))
        assert other.run(other.publish("o-1", **mine)) == ("SUCCESS", "receipt")
        assert other.runs == []

    @pytest.mark.parametrize("first", ["before", "after"])
    def test_that_each_call_has_to_give_outlives_a_new_name(self, version, first):
        """Nothing computes it: the arguments have no rule."""
        before = version()
        renamed = {"name": "pay", "idempotency_namespace_before": "charge"}
        after = version(**renamed)
        one, other = publishers(before, after, first)
        sent = one.publish("o-1", idempotency_key="mine")
        one.run(sent)
        again = other.publish("o-1", idempotency_key="mine")
        assert other.run(again) == ("SUCCESS", "receipt")
        assert other.run(sent) == ("SUCCESS", "receipt")
        assert other.runs == []

    @pytest.mark.parametrize("change", ["a name", "a finer key", "all of them"])
    def test_that_the_arguments_of_a_retry_do_not_have(self, version, change):
        """Its stamp has it: a version that knows both rules claims both identities."""
        old, new = CHANGES[change]
        before, after = version(**old), version(**new)
        for order, first, other in (("o-1", before, after), ("o-2", after, before)):
            sent = first.publish(order)
            sent.args = (None,)
            assert first.run(sent) == ("SUCCESS", "receipt")
            assert other.run(sent) == ("SUCCESS", "receipt")
            assert (len(first.runs), len(other.runs)) == (1, 0)
            first.runs.clear()

    def test_that_was_given_with_the_call_has_its_new_scope_in_between(self, version):
        """So tenants can use the same key, and the version after that finds what was done."""
        _, new = CHANGES["a scope"]
        between, last = version(**new), version(idempotency_key="order", idempotency_scope="tenant")
        ones, others = (
            between.publish("o-1", "sale", tenant, idempotency_key="mine")
            for tenant in ("one", "other")
        )
        for message in (ones, others, ones, others):
            assert between.run(message) == ("SUCCESS", "receipt")
        assert len(between.runs) == 2
        again = last.publish("o-1", "sale", "one", idempotency_key="mine")
        for message in (again, ones):
            assert last.run(message) == ("SUCCESS", "receipt")
        assert last.runs == []


class TestTheVersionAfterThat:
    """It has the new keys alone, and comes when all is done that the first version had to do with."""

    def test_knows_what_was_done_in_between(self, version, store):
        _, new = CHANGES["a finer key"]
        between, last = version(**new), version(idempotency_key=("order", "kind"))
        between.run(between.publish("o-1"))
        assert last.run(last.publish("o-1")) == ("SUCCESS", "receipt")
        assert last.runs == []
        found = store.get(Identity(namespace="charge", key='["o-1","sale"]'))
        assert found.state is State.COMPLETED

    def test_and_what_a_retry_with_other_arguments_did_in_between(self, version):
        _, new = CHANGES["a finer key"]
        between, last = version(**new), version(idempotency_key=("order", "kind"))

        def retries(task: Any) -> str:
            if not task.request.retries:
                raise task.retry(args=("o-2", "gift"), countdown=0)
            return "receipt"

        between.does = retries
        _, retry = between.run(between.publish("o-1"))
        assert between.run(retry) == ("SUCCESS", "receipt")
        assert last.run(last.publish("o-1")) == ("SUCCESS", "receipt")
        assert last.runs == []

    def test_and_what_was_published_in_between(self, version):
        _, new = CHANGES["a finer key"]
        between, last = version(**new), version(idempotency_key=("order", "kind"))
        sent = between.publish("o-1")
        last.run(last.publish("o-1"))
        assert last.run(sent) == ("SUCCESS", "receipt")
        assert len(last.runs) == 1


def test_a_run_whose_old_key_was_taken_is_late() -> None:
    """Frozen for longer than its lease, it finds that a worker of the old version has run it."""
    clock = FakeClock()
    store = MemoryStore(clock)
    old, new = CHANGES["a finer key"]
    before, after = Version(store, **old), Version(store, **new)

    def freezes(task: Any) -> str:
        clock.advance(120_000)
        before.run(before.publish("o-1"))
        return "too late"

    after.does = freezes
    assert after.run(after.publish("o-1")) == ("SUCCESS", "receipt")
    assert (len(before.runs), len(after.runs)) == (1, 1)
    before.close()
    after.close()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidOption, match="idempotency_key_before"):
        Version(MemoryStore(), idempotency_key="order", idempotency_key_before="no").publish("o-1")
    with pytest.raises(InvalidOption, match="idempotency_namespace_before"):
        Version(MemoryStore(), base=IdempotentTask, idempotency_namespace_before="").publish("o-1")
