"""Commands in this process, over records in memory."""

from __future__ import annotations

import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from celery_idempotent import signals
from celery_idempotent.celery import finding, sweep
from celery_idempotent.cli import commands, idempotency
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable, TooManyCrashes
from celery_idempotent.records import ReserveRequest, SettleRequest, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.store import RedisStore
from tests.support.admin import TASK, claim, identity, make_app, settle, value

DECLINED = value(
    '{"exc_type": "CardDeclined", "exc_message": ["Ada is out of money"], "exc_module": "shop.errors"}'
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore) -> Callable[..., Result]:
    """Run a command line over ``store``; ``said`` is what a person answers."""
    app = make_app(store)

    def run(*words: str, said: str = "") -> Result:
        return CliRunner().invoke(
            idempotency, list(words), obj=SimpleNamespace(app=app), input=said
        )

    return run


@pytest.fixture
def forgotten() -> Iterator[list[signals.Event]]:
    """The events that tell of forgotten keys."""
    heard: list[signals.Event] = []

    def note(event: signals.Event, **_: Any) -> None:
        heard.append(event)

    signals.forgotten.connect(note)
    yield heard
    signals.forgotten.disconnect(note)


@pytest.fixture
def every(store: MemoryStore) -> None:
    """A record in every state."""
    claim(store, "running", worker="worker-3.example:4711/ab12")
    claim(store, "stale", lease_ms=-1, worker="worker-2.example:12/ab12")
    store.interrupt(identity("crashed"), token=claim(store, "crashed").token)
    settle(store, claim(store, "done"), stored=value('"receipt of Ada"'))
    settle(store, claim(store, "declined"), State.FAILED, DECLINED)
    about = identity("queued")
    store.reserve(ReserveRequest(identity=about, task_id="t", deadline_ms=60_000, keep_ms=60_000))
    settle(store, claim(store, identity("of acme", scope="acme")), State.FAILED, DECLINED)
    settle(store, claim(store, identity("paid by acme", scope="acme")))


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_request_of_a_user_is_found_though_no_view_is_imported(
    run: Callable[..., Result], store: MemoryStore
) -> None:
    claim(store, identity("click-1", namespace="http", scope='["user",17]'))
    claim(store, identity("click-1", namespace="http", scope='["user",18]'))
    shown = run("show", "click-1", "--scope", '["user", 17]')
    assert shown.output.startswith('click-1 of http in scope ["user",17] is PROCESSING'), shown
    assert run("show", "click-2", "--scope", '["user", 17]').exit_code == commands.FOUND


def keys(result: Result) -> set[str]:
    assert result.exit_code == 0, result.output
    return {line["key"] for line in lines(result)}


ALL_BUT_COMPLETED = {"running", "stale", "crashed", "declined", "queued", "of acme"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", ALL_BUT_COMPLETED),
        ("--state completed", {"done", "paid by acme"}),
        ("--state live", {"running", "queued"}),
        ("--state stale", {"stale"}),
        ("--scope acme --state any", {"of acme", "paid by acme"}),
        ("--key done", {"done"}),
        ("--since 10m", ALL_BUT_COMPLETED),
        ("--before 10m", set()),
        ("--task other", set()),
        ("--error CardDeclined", {"declined", "of acme"}),
        ("--error Other", set()),
    ],
)
def test_list_finds_what_its_filters_mean(every, run, words, found):
    """As those of the admin, which share them."""
    assert keys(run("list", "--json", *words.split())) == found


def test_a_json_line_has_the_documented_names_and_times_in_utc(every, run):
    (line,) = lines(run("list", "--json", "--key", "running"))
    found = [line[name] for name in ("key", "task", "scope", "state", "stale")]
    assert found == ["running", TASK, "", "PROCESSING", False]
    assert line["updated"].endswith("Z")


def test_a_pipe_gets_whole_cells_between_tabs(every, run):
    head, *rows = [line.split("\t") for line in run("list").stdout.splitlines()]
    assert head[:4] == ["KEY", "STATE", "CHANGED", "TASK"]
    assert {row[0] for row in rows} == ALL_BUT_COMPLETED
    errors = {row[0]: row[5] for row in rows}
    assert (errors["declined"], errors["stale"]) == ("CardDeclined", "-")
    assert errors["crashed"] == "Its lease ended without a result."


def test_a_terminal_gets_columns(store, run, monkeypatch):
    """As wide as it is: a key, which is to be copied, is the last to be cut, and in another choice of columns whole."""
    monkeypatch.setattr(commands, "sys", SimpleNamespace(stdout=Mock()))
    monkeypatch.setenv("COLUMNS", "90")
    claim(store, identity("k" * 36, scope="acme"), lease_ms=-1)
    head, row = run("list").stdout.splitlines()
    assert head.index("STATE") == row.index("PROCESSING, stale") == 38
    assert max(map(len, (head, row))) <= 90
    claim(store, "q" * 99, lease_ms=-1)
    assert all(len(line) <= 90 for line in run("list").stdout.splitlines())
    monkeypatch.setenv("COLUMNS", "120")
    assert f"{'q' * 99}  PROCESSING, stale" in run("list", "--columns", "key,state").stdout


@pytest.mark.parametrize("terminal", [False, True])
def test_a_list_is_drawn_anew_until_it_is_interrupted(store, run, monkeypatch, terminal):
    monkeypatch.setattr(commands, "sys", SimpleNamespace(stdout=Mock(isatty=lambda: terminal)))
    clear = Mock()
    monkeypatch.setattr("click.clear", clear)
    claim(store, "a")
    sleeps = iter([lambda: claim(store, "b"), Mock(side_effect=KeyboardInterrupt)])
    monkeypatch.setattr(commands.time, "sleep", lambda _: next(sleeps)())
    drawn = run("list", "--watch")
    assert drawn.exit_code == 0
    words = [line.split()[0] for line in drawn.stdout.splitlines()]
    assert (words[:3], sorted(words[3:])) == (["KEY", "a", "KEY"], ["a", "b"])
    assert clear.call_count == 2 * terminal


def test_a_long_list_is_written_while_it_is_read(store, run, monkeypatch):
    """Of 300,000 records no more than a page is kept."""
    for number in range(30):
        claim(store, f"key {number}")
    pages, read, written = store.list, [], []
    monkeypatch.setattr(store, "list", lambda *a, **k: read.append(len(written)) or pages(*a, **k))
    monkeypatch.setattr(finding, "LOOK_AT", 10)
    monkeypatch.setattr(commands.click, "echo", lambda *a, **_: written.append(a))
    run("list", "--limit", "30", "--json")
    assert read[-3:] == [0, 10, 20]


COMPLETE = "complete stale --yes"
PARTS = "may have run in part: what it did may be done twice"
#: A command line; its exit code, the keys that are gone afterwards, and what it says.
SAID = [
    (
        "explain running",
        0,
        "",
        r"is PROCESSING.*worker-3.example, pid 4711. runs it.*Its lease ends",
    ),
    ("explain stale", 0, "", "is stuck PROCESSING.*Its lease ran out.*makes it INTERRUPTED"),
    ("explain crashed", 0, "", "ended without a result.*1 of 3 crashes.*Check the outside system"),
    ("explain done", 0, "", "is COMPLETED.*Kept until.*they get its result.*a second time"),
    (
        "explain declined",
        0,
        "",
        "FAILED permanently with CardDeclined.*get this error.*forget deletes",
    ),
    ("explain queued", 0, "", "no worker has it yet.*a worker listens.*the next call publishes"),
    ("release running --yes", 1, "", "its owner is live"),
    ("release running --yes --force", 2, "", "reason"),
    ("release running --yes --force --reason hangs", 0, "running", ""),
    ("release --all --state PROCESSING --yes", 1, "stale", "1 released, 1 left alone"),
    ("forget --all --error CardDeclined --yes", 0, "acme declined", "2 forgotten"),
    (
        "forget --all --state FAILED --json --yes",
        0,
        "acme declined",
        '("key": "(declined|of acme)".*"forget", "outcome": "done".*){2}',
    ),
    ("forget --all --state FAILED --dry-run", 0, "", f"2 records found.*2 {PARTS}"),
    ("forget --all --state any --dry-run --force --reason x", 0, "", f"4 {PARTS}.*2 TOOK EFFECT"),
    (
        "forget --all --state any --dry-run --force --reason x",
        0,
        "",
        "1 had a live owner.*1 waited",
    ),
    ("sweep --json", 0, "", '"interrupted": 1'),
    ("list --columns keys", 2, "", "Usage:"),
    ("list --since yesterday", 2, "", "Usage:"),
    ("list --state lost", 2, "", "Usage:"),
    ("explain", 2, "", "Usage:"),
    ("forget", 2, "", "Usage:"),
    ("forget --all order-17", 2, "", "Usage:"),
    ("forget --all --yes", 2, "", "Usage:"),
    ("forget order-17 --state FAILED", 2, "", "Usage:"),
    ("forget order-17 --key order-18", 2, "", "Usage:"),
    ("forget order-17 --dry-run", 2, "", "Usage:"),
    (COMPLETE, 2, "", "Missing option '--value'"),
    (f"{COMPLETE} --value ch_17", 2, "", "is not JSON"),
    (f"{COMPLETE} --value NaN", 2, "", "is not JSON"),
    (f"{COMPLETE} --value {'[' * 100_000}", 2, "", "is not JSON"),
    (f'{COMPLETE} --value "{"x" * 1_100_000}"', 2, "", "json, and 1,048,576 are allowed"),
]


@pytest.mark.parametrize(("words", "code", "gone", "told"), SAID, ids=[row[0][:60] for row in SAID])
def test_a_command_line_does_what_it_says_and_no_more(every, run, store, words, code, gone, told):
    before = dict(store.records)
    result = run(*words.split())
    assert result.exit_code == code, result.output
    said = " ".join(result.output.split())
    assert re.search(told, said), said
    assert "Ada" not in said, "no results, no messages of errors"
    left = before.keys() - store.records.keys()
    assert sorted(each.key.split()[-1] for each in left) == gone.split()
    assert code != 2 or store.records == before


def test_show_has_every_field_in_json_and_the_result_only_if_asked_for(every, run):
    (line,) = lines(run("show", "done", "--json"))
    assert (line["state"], line["crashes"], line["delivered"]) == ("COMPLETED", 0, False)
    assert line["explanation"]["headline"].startswith("done of shop.charge is COMPLETED")
    assert "value" not in line
    assert "Ada" not in run("show", "done").stdout
    assert "receipt of Ada" in run("show", "done", "--value").stdout


def test_a_tuple_is_typed_as_a_json_list(store, run):
    claim(store, '["order-17",2]')
    assert run("show", '["order-17", 2]').exit_code == 0


def test_explain_knows_that_an_atomic_run_leaves_no_rows(store, run):
    store.interrupt(identity("lost"), token=claim(store, "lost").token)
    assert "It may have run in part: what it did" in run("explain", "lost").stdout
    app = make_app(store, idempotency_atomic=True)
    result = CliRunner().invoke(idempotency, ["explain", "lost"], obj=SimpleNamespace(app=app))
    assert "It was rolled back in the database: what it did elsewhere" in result.stdout
    assert "If its worker was lost, the broker delivers its message again once" in result.stdout


def test_explain_says_that_a_claim_will_not_run_what_crashed_too_often(store, run):
    for _ in range(4):
        claim(store, "deadly", lease_ms=-1)
    assert store.get(identity("deadly")).crashes == 3
    told = " ".join(run("explain", "deadly").stdout.split())
    assert "claims it at once, and settles it FAILED (TooManyCrashes) without a run" in told


def _completed(store: MemoryStore, **end: Any) -> None:
    request = SettleRequest(
        record=claim(store, "o"), state=State.COMPLETED, value=None, keep_ms=3_600_000, **end
    )
    assert store.settle(request)


def _operated(operation: Any, *, on: str = "stale", **settings: Any) -> Callable[..., None]:
    def make(store: MemoryStore) -> None:
        task: Any = make_app(store, **settings).tasks[TASK]
        codec = task.idempotency_definition().codec
        record = claim(store, "o", lease_ms=-1, message=codec.dump_message(task.s("o")))
        if on == "interrupted":
            store.interrupt(record.identity, token=record.token)
        if on == "failed":
            task.idempotency_fail("o")
        method = getattr(task, f"idempotency_{operation}")
        value = ("ch_17",) if operation == "complete" else ()
        assert method("o", *value, who="alice", reason="the bank has it")

    return make


def _swept(store: MemoryStore) -> None:
    claim(store, "o", lease_ms=-1, on_stale="fail")
    sweep.sweep(make_app(store, idempotency_on_stale="fail"))


def _given_up(store: MemoryStore) -> None:
    app = make_app(store)
    for _ in range(4):
        claim(store, "o", lease_ms=-1, fingerprint=None)
    with pytest.raises(TooManyCrashes):
        app.tasks[TASK].apply(("o",), throw=True).get()


HAPPENED: dict[str, tuple[Callable[[MemoryStore], None], list[str]]] = {
    "replaced": (
        partial(_completed, replaced=True),
        ["another task (self.replace)", "other task's result"],
    ),
    "no value": (_completed, ["it took effect", "not in the record", "the result backend"]),
    "completed": (_operated("complete"), ["an operator completed it", "complete by alice: the b"]),
    "failed": (_operated("fail"), ["with FailedByOperator", "had it last", "fail by alice: the b"]),
    "requeued": (
        _operated("requeue", on="interrupted"),
        ["is QUEUED", "leases without a result: 1", "requeue by alice: the bank has it"],
    ),
    "run again": (
        _operated("requeue", on="failed"),
        ["is QUEUED", "From 20", "a sweep publishes its message again", "requeue by alice"],
    ),
    "may run again": (
        _operated("fail"),
        ["requeue runs it again: publishes the stored message", "chord, link_error and callers"],
    ),
    "timed out": (_swept, ["with ProcessingTimedOut", "leases without a result: 1"]),
    "gave up": (_given_up, ["with TooManyCrashes", "leases without a result: 4"]),
}


@pytest.mark.parametrize(("happened", "facts"), HAPPENED.values(), ids=HAPPENED)
def test_the_facts_that_decide_are_told(store, run, happened, facts):
    happened(store)
    told = " ".join(run("show", "o").stdout.split())
    for fact in facts:
        assert fact in told, told


def test_explain_says_of_what_is_no_task_of_this_app_that_it_was_answered(store, run):
    about = identity("order", namespace="http")
    settle(store, claim(store, about))
    told = run("explain", "order", "--task", "http").stdout
    assert "it was answered" in told
    assert "It may have taken effect: the next call" in told


def test_a_record_is_found_by_its_task_id_in_every_state(store, run, monkeypatch):
    claim(store, "busy", task_id="t-busy")
    settle(store, claim(store, identity("done", scope="acme"), task_id="t-done"))
    settle(store, claim(store, "@t-last/t-first", task_id="t-last"))  # the last step of a chain
    for task_id, key in (("t-busy", "busy"), ("t-done", "done"), ("t-last", "@t-last/t-first")):
        assert f"{key} of shop.charge" in run("explain", task_id).stdout
    assert run("complete", "t-done", "--value", "17", "--yes").exit_code == 2


def test_a_result_backend_that_is_silent_is_not_waited_for(run, monkeypatch):
    asked = threading.Event()
    backend = SimpleNamespace(get_task_meta=lambda *_, **__: asked.wait(60))
    monkeypatch.setattr("celery.Celery.backend", backend)
    monkeypatch.setattr(finding, "BACKEND_SECONDS", 0.2)
    assert run("show", "t-unknown").exit_code == 1
    asked.set()


def test_absence_says_what_it_can_mean_and_what_celery_knows(store, run):
    task_id = str(uuid.uuid4())
    without = run("explain", task_id)
    assert without.exit_code == 1
    for told in (f"No record has this key or task id: {task_id}", "never called"):
        assert told in without.stdout
    make_app(store).backend.store_result(task_id, 17, "SUCCESS")
    told = run("explain", task_id).stdout
    assert "Celery has SUCCESS for this task id: it ran" in told
    assert "never called" not in told


@pytest.mark.parametrize("when", ["within its lease", "after its lease", "after a sweep"])
def test_a_run_whose_end_was_not_recorded_is_not_told_as_lost_but_by_what_celery_knows(
    store, run, when
):
    """After settle_failed: the worker lives, it acknowledged the message, and its result is in the result backend."""
    live = when == "within its lease"
    task_id = str(uuid.uuid4())
    claim(store, "o", lease_ms=60_000 if live else -1, task_id=task_id)
    if when == "after a sweep":
        sweep.sweep(make_app(store))
    told = run("show", "o").stdout
    asks = "Celery has PENDING for its task (nothing): ask the outside system" in told
    assert asks is not live
    assert "its worker was lost" not in told.replace("If its worker was lost", "")
    assert "worker is dead" not in told
    make_app(store).backend.store_result(task_id, {"charge": "ch_17"}, "SUCCESS")
    told = run("show", "o").stdout
    assert "Celery has SUCCESS for its task: complete it with that result." in told
    assert ("runs it, or died" in told, "ch_17" in told) == (False, False)
    value = run("show", "o", "--value").stdout.partition("Value\n")[2]
    forced = ("--force", "--reason", "Celery has it") if live else ()
    assert run("complete", "o", "--value", value, "--yes", *forced).exit_code == 0
    assert "ch_17" in run("show", "o", "--value").stdout


def test_a_key_is_found_in_whatever_scope_it_is(store, run):
    """A key sent over HTTP has the caller in its scope: nobody who is called at night knows that."""
    settle(store, claim(store, identity("order-1", scope='["user",17]')))
    result = run("show", "order-1")
    assert result.exit_code == 0, result.output
    assert 'order-1 of shop.charge in scope ["user",17]' in result.stdout
    assert keys(run("list", "--json", "--key", "order-1")) == {"order-1"}
    claim(store, identity("order-1", scope="other"))
    assert run("show", "order-1").exit_code == 1


def test_show_names_the_other_scopes_that_have_the_key(store, run):
    """A customer was charged twice: by the task's own key, and by a request."""
    settle(store, claim(store, "order-1"))
    settle(store, claim(store, identity("order-1", scope='["user",17]')))
    settle(store, claim(store, identity("order-1", namespace="http", scope='["user",17]')))
    claim(store, identity("order-2", scope="acme"))
    told = run("show", "order-1")
    assert "order-1 of shop.charge is COMPLETED" in told.stdout
    elsewhere = told.stdout.partition("The same key elsewhere\n")[2].splitlines()[1:]
    found = {tuple(line.split("\t")[3:5]) for line in elsewhere}
    assert found == {(each, '["user",17]') for each in (TASK, "http")}
    (line,) = lines(run("show", "order-1", "--json"))
    assert len(line["elsewhere"]) == 2


def test_a_search_of_every_scope_ends_in_time(store, run, monkeypatch):
    settle(store, claim(store, "order-1"))
    settle(store, claim(store, identity("order-1", scope="acme")))
    monkeypatch.setattr(commands, "SCAN_SECONDS", -1.0)
    monkeypatch.setattr(finding, "LOOK_AT", 1)
    told = run("show", "order-1")
    assert "searched in part: `list --key order-1` looks at every key" in told.stderr
    assert "acme" not in told.stdout


def test_a_key_of_several_records_is_not_guessed(store, run):
    claim(store, "17")
    claim(store, '"17"')
    result = run("explain", "17")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 3


def test_an_operation_asks_and_without_a_yes_nothing_is_done(every, run, store, forgotten):
    for said in ("", "n\n"):
        result = run("forget", "done", said=said)
        assert result.exit_code == 1
        assert "TOOK EFFECT" in result.stderr
    assert store.get(identity("done")) is not None
    assert run("forget", "done", "--who", "alice", "--reason", "asked", said="y\n").exit_code == 0
    assert store.get(identity("done")) is None
    (event,) = forgotten
    assert (event.who, event.reason) == ("alice", "asked")


@pytest.mark.parametrize("key", ["done", "declined"])
def test_complete_replaces_an_end_only_if_forced_with_a_reason(every, run, store, key):
    before = store.get(identity(key))
    assert store.mark_delivered(before.identity, token=before.token)
    words = ("complete", key, "--task", TASK, "--value", '"ch_18"', "--yes")
    for more in ((), ("--reason", "typo"), ("--force",)):
        refused = run(*words, *more)
        assert (refused.exit_code, "reason" in refused.stderr) == (2, True), refused.stderr
    assert store.get(before.identity).token == before.token
    done = run(*words, "--force", "--reason", "the bank says 18")
    assert done.exit_code == 0, done.stderr
    assert "It ended (force it, with a reason): callers may have got the old value" in done.stderr
    after = store.get(before.identity)
    assert (after.state, after.token > before.token) == (State.COMPLETED, True)
    assert after.delivered is (key == "done"), "the callbacks of a success are not sent twice"
    told = run("show", key, "--task", TASK, "--value").stdout
    for fact in ("an operator completed it", "the bank says 18", "ch_18"):
        assert fact in told


def test_a_key_of_no_task_is_not_completed(run, store):
    claim(store, identity("order", namespace="http"), lease_ms=-1)
    result = run("complete", "order", "--task", "http", "--value", "17", "--yes")
    assert result.exit_code == 1
    assert "of a task of this app" in result.stderr
    assert store.get(identity("order", namespace="http")).state is State.PROCESSING


def test_a_filter_goes_on_where_its_limit_ended(store, run):
    for number in range(5):
        settle(store, claim(store, f"key {number}"), State.FAILED, DECLINED)
    words = ("forget", "--all", "--state", "FAILED", "--limit", "3", "--yes")
    first = run(*words)
    assert "Only the first 3: there may be more" in first.stderr
    assert len(first.stdout.splitlines()) == 3
    assert len(run(*words).stdout.splitlines()) == 2


@pytest.mark.redis
def test_only_a_forced_forget_deletes_a_record_that_cannot_be_read(
    redis_url, prefix, redis_client, forgotten
):
    store = RedisStore(redis_url, prefix=prefix)
    app, name = make_app(store), store._keys.of_record(identity("order-17"))[0]
    redis_client.set(name, b"damaged", ex=60)
    words, force = ["forget", "order-17"], ["--force", "--reason", "damaged"]
    for code, given, said in ((3, [], "y\n"), (1, force, "n\n"), (0, force, "y\n")):
        assert redis_client.exists(name)
        args, obj = [*words, *given], SimpleNamespace(app=app)
        result = CliRunner().invoke(idempotency, args, obj=obj, input=said)
        assert (result.exit_code, name.decode() in result.output) == (code, True)
        assert ("Forget it?" in result.output) is bool(given)
    assert not redis_client.exists(name)
    redis_client.set(name, b"damaged", ex=60)
    with pytest.raises(StoreMisconfigured, match="forget --force"):
        app.tasks[TASK].idempotency_forget("order-17")
    assert app.tasks[TASK].idempotency_forget("order-17", force=True, reason="damaged")
    assert [(event.identity.key, event.reason) for event in forgotten] == [
        ("order-17", "damaged")
    ] * 2
    store.close()


DOWN = Mock(side_effect=StoreUnavailable("it is down"))


@pytest.mark.parametrize(
    "words", ["list", "stats", "explain order-17", "forget order-17 --yes", "check --health"]
)
def test_a_store_that_does_not_answer_is_exit_code_3(run, store, monkeypatch, words):
    for verb in ("get", "list", "stats"):
        monkeypatch.setattr(store, verb, DOWN)
    result = run(*words.split())
    assert result.exit_code == 3
    assert "it is down" in result.stderr


def test_a_store_that_fails_in_the_middle_ends_an_operation(store, run, monkeypatch):
    for number in range(3):
        settle(store, claim(store, f"key {number}"), State.FAILED, DECLINED)

    monkeypatch.setattr(store, "forget", DOWN)
    result = run("forget", "--all", "--task", TASK, "--yes")
    assert result.exit_code == 3
    assert "2 unknown" in result.stderr
    assert "1 not tried" in result.stderr


def test_stats_counts_records_and_outcomes(every, run, store):
    """A failure leaves no record: without the releases a task that always fails had 20 runs and no failure."""
    counted = {"claimed": 20, "released": 20, "released:BankDown": 20, "mismatched": 3}
    store.count({(TASK, outcome): count for outcome, count in counted.items()})
    (line,) = lines(run("stats", "--json"))
    assert (line["stale"], line["interrupted"], line["failed"]) == (1, 1, 2)
    assert line["outcomes"] == {TASK: counted}
    head, row = [line.split("\t") for line in run("stats").stdout.splitlines()[-2:]]
    figures = dict(zip(head, row, strict=True))
    assert (figures["RUNS"], figures["RELEASES"], figures["FAILURES"]) == ("20", "20", "0")
    assert set(figures["TROUBLE"].split(", ")) == {"20 released:BankDown", "3 mismatched"}


def test_prune_deletes_what_is_past_its_retention(store, run):
    claim(store, "old", lease_ms=-2000, keep_ms=1000)
    assert lines(run("prune", "--json")) == [{"pruned": 1}]


def test_check_tells_of_findings_and_its_exit_code_says_so(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "django_tenants", raising=False)  # of tests/sql
    result = run("check", "--json")
    assert result.exit_code == 1
    assert [line["id"] for line in lines(result)] == ["W005"]
    assert "memory:// is for tests" in run("check").stdout


def test_health_is_well_where_the_store_answers_and_sweeps_run(run, store):
    assert run("check", "--health").exit_code == 1
    assert "does beat run" in run("stats").stdout
    assert run("sweep").exit_code == 0
    (line,) = lines(run("check", "--health"))
    assert line["well"]
    assert line["sweep"]["ago_s"] == 0


@pytest.mark.parametrize(
    ("error", "verbs", "problem"),
    [
        (StoreUnavailable("away"), ("stats", "probe"), "down"),
        (StoreMisconfigured("away"), ("stats", "probe"), "refused"),
        (StoreMisconfigured("away"), ("probe",), "refused"),
        (StoreUnavailable("away"), ("probe",), "read-only"),
    ],
)
def test_health_tells_a_store_that_is_down_from_one_that_refuses(
    run, store, monkeypatch, error, verbs, problem
):
    for verb in verbs:
        monkeypatch.setattr(store, verb, Mock(side_effect=error))
    result = run("check", "--health")
    (line,) = lines(result)
    assert (result.exit_code, line["well"], line["store"]["problem"]) == (3, False, problem)
    assert ("sweep" in line) == ("stats" not in verbs)
    assert f"{problem}: away" in result.stderr


def test_check_shows_memory_and_eviction(private_redis):
    app = make_app(private_redis.url())
    shown = CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=app)).stderr
    assert re.search(r"[\d.]+[KMG] of 0B used \(0B: no limit\), maxmemory-policy noeviction", shown)


def test_health_misses_sweeps_after_three_intervals_where_the_store_notes_them(run, store):
    store.note_sweep()
    store._swept_ms -= 91_000  # every 30 s
    assert run("check", "--health").exit_code == 1
    store._swept_ms += 2_000
    assert run("check", "--health").exit_code == 0
    store._swept_ms, store.supports_counting = None, False
    assert run("check", "--health").exit_code == 0
    assert "This store does not note sweeps." in run("stats").stdout
