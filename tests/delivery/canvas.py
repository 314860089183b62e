"""Scenarios of the guide's chapter on canvas: signatures, chains, groups, chords, chunks, stamps; and all eager."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from tests.delivery.scenario import scenario
from tests.delivery.sides import PATIENCE, Stage


@scenario("a chain hands each result to the next step, and knows its parents")
def chains(s: Stage) -> None:
    result = chain(s.add.s(4, 4), s.mul.s(8), s.mul.s(10))()
    assert s.get(result) == 640
    assert (s.get(result.parent), s.get(result.parent.parent)) == (64, 8)
    s.see(result)
    piped = (s.add.s(2, 2) | s.mul.s(8) | s.mul.s(10)).apply_async()
    assert s.get(piped) == 320
    s.note("graph", len(list(result.parent.parent.collect(intermediate=True))))


@scenario("a chain takes the id of its last task, and options of the call for its first")
def chain_ids(s: Stage) -> None:
    sig = chain(s.show.si(), s.show.si())
    result = sig.apply_async(priority=6, headers={"first": True})
    assert s.get(result)["headers"] is None
    assert s.get(result.parent)["headers"] == {"first": True}
    own = chain(s.add.s(1, 1), s.add.s(1)).apply_async(task_id=f"last-{s.side.name}")
    assert own.id == f"last-{s.side.name}"
    assert s.get(own) == 3


@scenario("a failing step ends its chain, and calls the errbacks that the chain was given")
def chain_fails(s: Stage) -> None:
    sig = chain(s.add.s(1, 1), s.fail.s(), s.quiet.s())
    sig.link_error(s.new.s())
    result = sig.apply_async()
    assert isinstance(s.error(result.parent), ValueError)
    s.wait_seen(result.parent.id, "errback")
    assert isinstance(s.state(result, "FAILURE"), ValueError)
    s.see(result)
    by_call = chain(s.fail.s(), s.quiet.s()).apply_async(link_error=s.old.s())
    assert isinstance(s.error(by_call), ValueError)


@scenario("a group with a failing member fails, and the others end")
def group_fails(s: Stage) -> None:
    result = group([s.add.s(1, 1), s.fail.s(), s.add.s(2, 2)], app=s.app).apply_async()
    with pytest.raises(ValueError, match="no luck"):
        result.get(timeout=PATIENCE)
    values = result.get(timeout=PATIENCE, propagate=False)
    s.note("values", [repr(each) for each in values])
    assert (result.failed(), result.completed_count()) == (True, 2)


@scenario("a chord's body gets the results of its header, in their order")
def chords(s: Stage) -> None:
    header = [s.add.s(n, n) for n in range(6)]
    assert s.get(chord(header, app=s.app)(s.echo.s())) == [[[0, 2, 4, 6, 8, 10]], {}]
    assert s.get(chord(header, s.tsum.s(), app=s.app).apply_async()) == 30
    assert s.get(chord(header, s.quiet.si("done"), app=s.app).delay()) == "done"
    assert s.get(chord([s.add.s(2, 2)], s.tsum.s(), app=s.app).apply_async()) == 4


@scenario("a chord's body may be a chain, a group or a chord, and so may members of its header")
def chord_parts(s: Stage) -> None:
    header = [s.add.s(1, 1), s.add.s(1, 1)]
    assert s.get(chord(header, s.tsum.s() | s.mul.s(10), app=s.app).apply_async()) == 40
    both = group([s.tsum.s(), s.tsum.s()], app=s.app)
    assert s.get(chord(header, both, app=s.app).apply_async()) == [4, 4]
    inner = chord(both, s.tsum.s(), app=s.app)
    assert s.get(chord(header, inner, app=s.app).apply_async()) == 8
    chains = [chain(s.add.s(1, 1), s.mul.s(2)) for _ in range(2)]
    assert s.get(chord(chains, s.tsum.s(), app=s.app).apply_async()) == 8
    chords = [chord(header, s.tsum.s(), app=s.app) for _ in range(2)]
    assert s.get(chord(chords, s.tsum.s(), app=s.app).apply_async()) == 8


@scenario("a failing header fails its body with ChordError, and the other members run")
def chord_fails(s: Stage) -> None:
    body = s.quiet.s().on_error(s.new.s())
    result = chord([s.fail_if.s("a"), s.fail_if.s("bad")], body, app=s.app).apply_async()
    assert isinstance(s.state(result, "FAILURE"), ChordError)
    # Not before: get() raises the error that it sees first, of the body or of the header.
    assert isinstance(s.error(result), KeyError)
    s.wait_seen(result.id, "errback")
    assert all(each.get(timeout=PATIENCE, propagate=False) for each in result.parent.results)


@scenario("errbacks of a chord in their several styles run when its body fails, too")
def chord_errbacks(s: Stage) -> None:
    for name in ("old", "bound_old"):
        body = s.quiet.s().on_error(getattr(s, name).s())
        failed = chord([s.fail_if.s("bad"), s.fail_if.s("bad")], body, app=s.app).apply_async()
        assert isinstance(s.state(failed, "FAILURE"), ChordError)
        s.error(failed)
    sig = chord([s.add.s(1, 1), s.add.s(1, 1)], s.fail.s(), app=s.app)
    sig.link_error(s.new.s())
    result = sig.apply_async()
    assert isinstance(s.error(result), ValueError)
    s.wait_seen(result.id, "errback")


@scenario("map and starmap call a task for each item of one message")
def maps(s: Stage) -> None:
    assert s.get(s.tsum.map([[1, 2], [3, 4]]).apply_async()) == [3, 7]
    assert s.get(s.add.starmap([(1, 2), (3, 4)]).apply_async()) == [3, 7]
    assert (~s.tsum.map([list(range(10))])) == [45]
    together = group([s.add.starmap([(1, 1)]), s.add.starmap([(1, 1)])], app=s.app)
    assert s.get(together.apply_async()) == [[2], [2]]


@scenario("a stamp reaches the task, its result's meta data and its retries")
def stamps(s: Stage) -> None:
    members = group([s.show.si(), s.show.si()], app=s.app)
    members.stamp(stamp="your_custom_stamp")
    result = members.apply_async()
    stamps = [each["stamps"] for each in s.get(result)]
    assert s.note("stamps", stamps) in (
        [{"stamp": "your_custom_stamp"}] * 2,
        [{"stamp": ["your_custom_stamp"]}] * 2,
    )
    meta = result.results[0]._get_task_meta()
    s.note("stamp", meta["stamp"])
    retried = s.retries.s(1)
    retried.stamp(tenant="a")
    again = retried.apply_async()
    assert s.get(again) == [1, None]
    s.note("meta", again._get_task_meta().get("tenant"))


@scenario("apply runs a task here, and its result is there at once", alone=True)
def apply(s: Stage) -> None:
    assert s.get(s.add.apply((2, 2))) == 4
    assert s.get(s.add.s(2).apply((3,))) == 5
    failed = s.fail.apply(link_error=s.new.s())
    assert isinstance(s.error(failed), ValueError)
    with pytest.raises(ValueError, match="no luck"):
        s.fail.apply(throw=True)
    shown = s.show.apply(headers={"tenant": "a"}, retries=2).get()
    assert (shown["eager"], shown["retries"], shown["headers"]) == (True, 2, {"tenant": "a"})
    s.note("shown", shown)
    linked = s.add.apply((1, 1), link=s.quiet.s())
    assert s.get(linked) == 2


@scenario("a frozen signature that is sent twice runs twice", differs="frozen-canvas")
def frozen(s: Stage) -> None:
    sig = s.quiet.s("x")
    sig.freeze()
    results = [sig.apply_async() for _ in range(2)]
    assert [each.get(timeout=PATIENCE) for each in results] == ["x", "x"]
    s.side.settle(s.scenario, 0)
    assert len(s.seen(results[0].id, "ran")) == (1 if s.ours else 2)


@scenario("a signature that is sent twice, and a chain, run twice")
def sent_twice(s: Stage) -> None:
    parts = chord([s.add.s(1), s.add.s(2)], s.tsum.s(), app=s.app)
    for sig in (s.quiet.s("x"), chain(s.quiet.s("y"), s.quiet.s()), chain(s.add.s(1, 1), parts)):
        results = [sig.apply_async() for _ in range(2)]
        values = [each.get(timeout=PATIENCE) for each in results]
        assert values[0] == values[1]
