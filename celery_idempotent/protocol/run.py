"""A run: claim, refuse poison, heartbeat, body, settle or release, report.

::

    claim ──▶ Claimed ────▶ body ──▶ value ──────────▶ settle COMPLETED ──▶ returned
      │                       │                          └─ a newer claim ──▶ claim again: answered as its duplicate
      │                       ├────▶ permanent error ─▶ settle FAILED ─────▶ raised
      │                       └────▶ any other ───────▶ release ───────────▶ raised
      ├────▶ Settled ─────▶ replay
      ├────▶ Held ────────▶ wait for the holder, then conflict
      ├────▶ Mismatched ──▶ FingerprintMismatch
      └────▶ no answer ───▶ store_failed, or a run without protection

The caller, a delivery of a task or a request of a view, is a subclass of :class:`Run`, whose hooks answer the call.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from celery_idempotent import backoff, errors, signals
from celery_idempotent.protocol.claim import Claim, Phase, current_run
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.shield import NO_SHIELD, Shield, VerbInterruptedError, shields
from celery_idempotent.records import (
    ATTEMPT_BYTES,
    Answer,
    Claimed,
    ClaimRequest,
    EndState,
    Held,
    Identity,
    Mismatched,
    Record,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.serializers import log_not_kept
from celery_idempotent.signals import Call, report
from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Body = Callable[[], object]

#: Of one open transaction: ``on_commit(hook)`` has Django call ``hook()`` after the COMMIT.
OnCommit = Callable[[Callable[[], None]], None]

#: Python 3.11 needs 0.2 µs to look up a member of an Enum.
CLAIMING, RUNNING, RELEASED = Phase.CLAIMING, Phase.RUNNING, Phase.RELEASED
SETTLING, SETTLED, ENDED, AGAIN = Phase.SETTLING, Phase.SETTLED, Phase.ENDED, Phase.AGAIN
PROCESSING: Final = State.PROCESSING
COMPLETED: Final = State.COMPLETED
FAILED: Final = State.FAILED

UNFINISHED = (CoroutineType, GeneratorType, AsyncGeneratorType)

#: How long a claim, and a release, try to reach the store, in seconds. A settle tries for a whole lease.
CLAIM_SECONDS, RELEASE_SECONDS = 3.0, 1.0
#: A time that is over: the store is asked once.
ONCE: Final = 0.0

#: The outcomes of an observed task's duplicates, by the answer to the claim.
_OBSERVED = {Held: signals.conflicted, Settled: signals.replayed, Mismatched: signals.mismatched}


class Run(Claim, Call):
    """One delivery of one call: its options, its progress, and the hooks of its caller."""

    #: Exceptions by which a body directs its message; they are never failures.
    control: tuple[type[Exception], ...] = ()
    #: Every worker gets this message under one task id, and runs it without protection.
    is_broadcast = False
    #: A client asks for the outcome: any exception settles FAILED, not only a permanent one.
    keeps_failure = False
    #: A sweep publishes it if the claim goes stale.
    message: bytes | None = None
    #: Where its call is reserved until it starts, if that is not the key itself.
    waits_at: Identity | None = None
    #: The message of the newest call that this one stands for.
    newest: bytes | None = None
    #: The body replaced its task by another one, which has its task id.
    replaced = False
    #: :func:`.atomic.run_body`, if the policy is atomic.
    in_transaction: Callable[[Run, Body], object] | None = None
    #: How often the database rolled this call back at its end.
    repeats = 0
    #: Releases the key after a rollback and, unless the run is eager, publishes a retry.
    after_rollback: Callable[[], object] | None = None
    #: Returns the ``on_commit`` of each transaction around an eager run, none if the record is part of one.
    open_transactions: Callable[[Store], Sequence[OnCommit]] | None = None
    #: Is :meth:`after_settle` to be called?
    has_callbacks = False
    settling_since = 0.0
    #: How long the caller waits for a settle; the heartbeat goes on with it. If it is longer than a lease, a lease.
    settle_seconds = math.inf
    #: Of a duplicate that waits.
    polls = 0
    store: Store = None  # type: ignore[assignment]  # only until it is opened

    identity: Identity
    fingerprint: bytes | None
    worker: str
    started_at: float
    shield: Shield

    @property
    def running_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started_at

    # -- hooks ---------------------------------------------------------------------------------------------------------

    #: Returns the store, or raises one of its errors.
    open_store: Callable[[], Store]
    #: Returns the value of a record, settled so many milliseconds ago, or raises its exception.
    replay: Callable[[Record, int], object]
    #: Raises the outcome of a call whose key another run holds, whose lease ends in so many milliseconds.
    conflict: Callable[[Record, int], NoReturn]

    def store_failed(self, error: Exception, *, begun: bool = False) -> NoReturn:
        """Raise the outcome of a call that did not run; ``begun``: it was rolled back, or that is in doubt."""
        raise NotImplementedError

    def write_end(self, end: SettleRequest) -> bool:
        """Write the end state, with the task's result if possible; ``False``: a newer claim has the key."""
        return self.store.settle(end)

    def after_settle(self, state: EndState) -> None:
        """React to an end state that is written and reported."""

    def kept_message(self) -> bytes | None:
        """Return the message that the record of a failure keeps, for a person to run it again."""
        return None

    def is_over_time(self) -> bool:
        """Does the hard time limit of this run end the process?"""
        return False

    def longest_wait_ms(self) -> int | None:
        """Return how long a duplicate may hold its worker; ``None``: no limit but that of its policy."""
        return None


def run_in_progress() -> Run | None:
    """Return the run whose body called this."""
    run = current_run.get()
    return run if isinstance(run, Run) and run.phase in (RUNNING, RELEASED) else None


def execute(run: Run, body: Body) -> object:
    """Run ``body`` once for the key of ``run``, or answer from the record.

    Raises:
        FingerprintMismatch: if the key belongs to a call with other arguments.
        BaseException: what ``body`` raised, or what the caller makes of a conflict or of a store that fails.
    """
    run.started_at = time.monotonic()
    run.shield = shield = shields.get(get_ident(), NO_SHIELD)
    was_closed, shield.closed, shield.over = shield.closed, True, None
    try:
        if run.is_broadcast:
            return _run_unguarded(run, body)
        if run.policy.mode == "observe":
            return _observe(run, body)
        while True:
            match _claim(run):
                case Claimed(record=record):
                    if record.crashes and _refuse_poison(run, record):
                        continue
                    if run.waits_at is not None:
                        _start(run, record, run.waits_at)
                    value = _run_body(run, record, body)
                    if run.phase is not AGAIN:
                        return value
                case Settled(record=record, age_ms=age_ms):
                    if run.waits_at is not None and record.task_id == run.task_id:
                        with suppress(*errors.STORE_ERRORS):  # else its deadline ends it
                            run.store.start(run.waits_at, task_id=run.task_id)
                    report(run, signals.replayed, record, seconds=run.running_s)
                    return run.replay(record, age_ms)
                case Held(record=record, left_ms=left_ms):
                    if not _wait_for_holder(run, left_ms):
                        report(run, signals.conflicted, record, seconds=run.running_s)
                        run.shield.let_exit()
                        run.conflict(record, left_ms)
                case Mismatched(record=record):
                    report(run, signals.mismatched, record, seconds=run.running_s)
                    raise errors.FingerprintMismatch(
                        f"{run.identity} belongs to task {record.task_id}, which was called with other arguments: "
                        "a key identifies one operation. Use another key, or take what may differ out of "
                        "idempotency_fingerprint."
                    )
                case error:
                    report(run, signals.store_failed, error=error)
                    run.shield.let_exit()
                    if run.policy.on_store_error != "open":
                        run.store_failed(error)
                    line = "idempotency: %s[%s] runs without protection: %s"
                    logger.warning(line, run.name, run.task_id, error)
                    return _run_unguarded(run, body)
    finally:
        shield.leave(was_closed=was_closed, over=run.task_id if current_run.get() is None else None)


def _run_body(run: Run, record: Record, body: Body) -> object:
    """Heartbeat, body, settle or release. A phase of AGAIN then means that there is no value."""
    run.record, run.steps, run.phase = record, dict(record.steps), RUNNING
    outer = current_run.set(run)
    # An atomic run holds a lock of its database instead; another thread does not see a record in an open transaction.
    is_renewed = run.in_transaction is None or run.policy.mode == "observe"
    if is_renewed and not (run.store.supports_transactions and run.store.joined()):
        heartbeat.add(run)
    try:
        claimed_s = time.monotonic() - run.renewed_at
        report(run, signals.claimed, record, state=PROCESSING, seconds=claimed_s)
        if run.in_transaction is None:
            run.shield.open()
            value = body()
        else:
            value = run.in_transaction(run, body)
        run.shield.closed = True
        if isinstance(value, UNFINISHED):
            refuse_unfinished(run, value)
    except BaseException as error:
        run.shield.closed = True
        _end_failed(run, error)
        if run.phase is AGAIN and isinstance(error, Exception):
            return None
        raise
    else:
        if run.phase is RUNNING:
            _settle(run, end_of(run, COMPLETED, value))
        return value
    finally:
        if run.phase in (RUNNING, RELEASED):
            run.phase = ENDED
        if run.phase is not SETTLING:
            heartbeat.remove(run)
        current_run.reset(outer)


def _start(run: Run, record: Record, place: Identity) -> None:
    """Give up the place where this call waited: from now on the next call may wait there.

    Without an answer the body must not run: calls that come meanwhile would be taken for covered by it.
    """
    run.record, run.steps = record, dict(record.steps)
    until = time.monotonic() + CLAIM_SECONDS
    start = partial(run.store.start, place, task_id=run.task_id)
    try:
        replaces = run.policy.on_duplicate == "replace"
        waited = _start_newest(run, until, place, start) if replaces else _ask(run, until, start)
    except errors.STORE_ERRORS as error:
        report(run, signals.store_failed, record, error=error)
        give_back(run)
        run.shield.let_exit()
        run.store_failed(error)
    if waited is not None and waited.copies:
        record.copies = tuple(dict.fromkeys((*record.copies, *waited.copies)))


def _start_newest(
    run: Run, until: float, place: Identity, start: Callable[..., Record | None]
) -> Record | None:
    """Start with the message of the newest call, which a step keeps over a crash.

    ::

        run    look: token 5 ─ step ─ start, token 5: changed ─ look: token 6 ─ step ─ start, token 6: done
        call                  replace: token 6                                        replace: none ─ reserve anew
    """
    waited: Record | None = None
    while waited is None:
        found = _ask(run, until, run.store.get, place)
        if found is None or found.task_id != run.task_id:
            break
        name = f"~{run.task_id} {found.token}"
        if found.message is not None and name not in run.steps:
            run.steps[name] = step = Stored("application/octet-stream", "binary", found.message)
            keep = partial(run.store.checkpoint, run.identity, token=run.token)
            _ask(run, until, keep, name=name, value=step)
        waited = _ask(run, until, start, token=found.token)
    run.newest = _newest_in(run, run.steps)
    return waited


def _newest_in(run: Run, steps: Mapping[str, Stored]) -> bytes | None:
    newest = [name for name in steps if name.startswith(f"~{run.task_id} ")]
    latest = max(newest, key=lambda name: int(name.rpartition(" ")[2]), default=None)
    return None if latest is None else steps[latest].body


def refuse_unfinished(run: Run, value: Any) -> None:
    """Raise for a coroutine or generator that a body returned, which has run nothing yet."""
    if run.policy.mode != "observe":
        if isinstance(value, CoroutineType):
            value.close()  # else Python warns
        raise errors.IdempotencyError(
            f"{run.name} returned a {type(value).__name__}, of which nothing was run, and its key is free again. "
            "Run it inside the task, for example by asyncio.run(…)."
        )


def _ask(run: Run, until: float, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the answer of a verb, asked again ``until`` then; of a process that is ending once more, at once."""
    failures = 0
    while True:
        try:
            run.shield.waiting = True
            answer = verb(*args, **kwargs)
            run.shield.waiting = False
        except Exception as error:  # noqa: PERF203  the next try may not fail
            run.shield.waiting = False
            left = until - time.monotonic()
            # After the body nothing but another try helps, whatever the error.
            is_away = isinstance(error, (errors.StoreUnavailable, VerbInterruptedError))
            if left <= 0 or (run.phase is CLAIMING and not is_away):
                if isinstance(error, VerbInterruptedError):
                    raise errors.StoreUnavailable(str(error)) from None
                raise
            failures += 1
            if run.shield.ending:
                until = ONCE
            else:
                run.shield.pause(min(backoff.seconds(failures), left))
        else:
            return answer


def _claim(run: Run) -> Answer | errors.StoreUnavailable | errors.StoreMisconfigured:
    """Ask the store for the key; each try has the same attempt id."""
    policy, observed = run.policy, run.policy.mode == "observe"
    run.phase, run.lost, run.replaced = CLAIMING, False, False
    request = ClaimRequest(
        run.identity,
        os.urandom(ATTEMPT_BYTES),
        policy.lease_ms,
        policy.keep_ms,
        run.fingerprint,
        run.task_id,
        run.worker,
        # A sweep leaves alone what is only observed.
        "interrupt" if observed else policy.on_stale,
        run.message,
        policy.each_runs,
    )
    run.renewed_at = time.monotonic()
    until = ONCE if observed else run.renewed_at + CLAIM_SECONDS
    try:
        run.store = run.store or run.open_store()  # type: ignore[truthy-bool]  # None at first
        return _ask(run, until, run.store.claim, request)
    except BaseException as error:
        opened = vars(run).get("store") is not None
        if opened and not isinstance(error, errors.StoreMisconfigured):
            # The store may carry out the claim later, and would hold the key for a lease while nobody runs.
            back = partial(run.store.take_back, run.identity, attempt=request.attempt)
            heartbeat.finish_later(partial(back, requeue_ms=policy.lease_ms))
        if isinstance(error, errors.STORE_ERRORS):
            return error
        raise


def _wait_for_holder(run: Run, left_ms: int) -> bool:
    """Pause before the next claim if the policy is to wait; ``False`` if not, or if the time is up."""
    if run.policy.on_conflict != "wait":
        return False
    wait_ms, longest_ms = run.policy.wait_ms, run.longest_wait_ms()
    if longest_ms is not None:
        wait_ms = min(wait_ms, longest_ms)
    left = wait_ms / 1000 - run.running_s
    if left <= 0:
        return False
    run.polls += 1
    # The holder's lease may end before the next look would be due.
    longest = max(min(left_ms / 1000, 0.5), 0.001)
    return run.shield.pause(min(backoff.seconds(run.polls, first=0.02, longest=longest), left))


def _refuse_poison(run: Run, record: Record) -> bool:
    """Settle FAILED a key that is not to run again (celery #9082); the next claim replays that."""
    crashes, policy = record.crashes, run.policy
    error: errors.IdempotencyError
    if policy.on_stale == "fail":
        error = errors.ProcessingTimedOut(
            f"{run.name} was not run again: the last run of {run.identity} did not come back, and "
            'idempotency_on_stale="fail" leaves it to a person. Find out what it did, then complete the key, '
            "or forget it."
        )
    elif crashes > policy.max_crashes:
        error = errors.TooManyCrashes(
            f"{run.name} was not run again: {crashes} runs of {run.identity} ended in a crash of their "
            f"worker, more than idempotency_max_crashes ({policy.max_crashes}). Find the cause, then "
            "forget the key.",
            crashes,
        )
    else:
        return False
    run.record, run.newest = record, _newest_in(run, dict(record.steps))
    try:
        if run.store.settle(end_of(run, FAILED, error)):
            line = signals.FAILED_WITHOUT_RUN
            report(run, signals.settled, record, state=FAILED, error=error, line=line)
        else:
            report(run, signals.lease_lost, record)
    except errors.STORE_ERRORS as trouble:  # nothing ran: the message comes back
        report(run, signals.store_failed, record, error=trouble)
        run.store_failed(trouble)
    return True


def end_of(run: Run, state: EndState, outcome: Any) -> SettleRequest:
    """Return the request that settles a run: without a value, if the outcome cannot be serialized."""
    value: Stored | None = None
    message = None
    if not run.replaced:
        dump = run.codec.dump_value if state is COMPLETED else run.codec.dump_error
        try:
            value = dump(outcome)
        except Exception as error:  # noqa: BLE001  of classes of any kind
            log_not_kept(run.identity, state, error)
    if state is FAILED:
        try:
            message = run.kept_message()
        except Exception as error:  # noqa: BLE001  of arguments of any kind
            logger.warning("idempotency: the message of %s is not kept: %s", run.identity, error)
    keep_ms = run.policy.settled_keep_ms
    words = signals.error_in_words(outcome) if state is FAILED else ""
    return SettleRequest(
        run.record, state, value, keep_ms, run.replaced, message=message, error=words
    )


def _settle(run: Run, end: SettleRequest, failure: BaseException | None = None) -> None:
    """Write the end state, at once unless the caller has transactions open."""
    if run.open_transactions is not None and _settles_after_commit(run, end, failure):
        return
    run.settling_since = time.monotonic()
    observed = run.policy.mode == "observe"
    try:
        try:
            written = _ask(run, ONCE, run.write_end, end)
        except Exception:
            if observed:
                raise
            written = _write_alone(run, end)
    except Exception as error:  # noqa: BLE001  of the store
        run.phase = ENDED
        if observed:
            logger.warning("idempotency: observing: could not settle %s: %s", run.identity, error)
        else:
            report(run, signals.settle_failed, run.record, error=error)
    else:
        if written:
            note_end(run, end.state, failure)
        elif run.phase is not SETTLING:
            _lose(run)


def _settles_after_commit(run: Run, end: SettleRequest, failure: BaseException | None) -> bool:
    """Settle after the COMMIT of all transactions that the caller has open; ``False``: there are none.

    After a rollback of one of them the lease ends the claim.
    """
    on_commits = run.open_transactions(run.store) if run.open_transactions is not None else ()
    uncommitted = len(on_commits)

    def after_commit() -> None:
        nonlocal uncommitted
        uncommitted -= 1
        if uncommitted:
            return
        was_closed, run.shield.closed = run.shield.closed, True
        run.open_transactions = None
        try:
            _settle(run, end, failure)
        finally:
            run.shield.leave(was_closed=was_closed)

    for on_commit in on_commits:
        on_commit(after_commit)
        run.phase = Phase.AWAITS_COMMIT
    return bool(on_commits)


def _write_alone(run: Run, end: SettleRequest) -> bool:
    """Write the end state after a first try failed; try for a whole lease: without it the effect would be repeated.

    The record alone: the task's result may be the cause, and Celery stores it anyway.
    """

    def write() -> bool:
        nonlocal end
        try:
            return run.store.settle(end)
        except Exception as error:
            is_away = isinstance(error, (errors.StoreUnavailable, VerbInterruptedError))
            # A server may close the connection at a large value, as if it were away.
            size = len(end.message or b"") + (0 if end.value is None else len(end.value.body))
            if size < 64 * 1024 and is_away:
                raise
            if end.message is not None:  # first what only an operator would miss
                line = "idempotency: the message of %s is not kept: %s"
                logger.warning(line, run.identity, error)
                end = replace(end, message=None)
            elif end.value is not None:
                log_not_kept(run.identity, end.state, error)
                end = replace(end, value=None)
            raise

    def write_later() -> None:
        if run.phase is not SETTLING:
            return  # the heartbeat calls it more than once
        try:
            note_end(run, end.state) if write() else _lose(run)
        except Exception as error:
            if time.monotonic() < run.settling_since + lease_s:
                raise errors.StoreUnavailable(str(error)) from error
            run.phase = ENDED
            report(run, signals.settle_failed, run.record, error=error)

    if run.shield.ending:
        return _ask(run, ONCE, write)
    lease_s = run.policy.lease_ms / 1000
    run.shield.pause(min(backoff.seconds(1), lease_s))
    if run.settle_seconds >= lease_s:
        return _ask(run, run.settling_since + lease_s, write)
    until = run.settling_since + run.settle_seconds
    with suppress(Exception):
        if time.monotonic() < until:  # a silent store takes longer than that
            return _ask(run, until, write)
    run.phase = SETTLING
    heartbeat.finish_later(write_later)
    return False


def note_end(run: Run, state: EndState, error: BaseException | None = None) -> None:
    """Report that the end state is written."""
    run.phase = SETTLED
    took = time.monotonic() - run.settling_since
    report(run, signals.settled, run.record, state=state, error=error, seconds=took)
    if run.has_callbacks:
        run.after_settle(state)


def _end_failed(run: Run, error: BaseException) -> None:
    """End the claim of a body that raised ``error``: settle or release it."""
    if run.phase is not RUNNING:
        return  # released for a retry or a replacement by the body; ended by its transaction
    if run.replaced:
        _settle(run, end_of(run, COMPLETED, None))
    elif _is_final(run, error):
        _settle(run, end_of(run, FAILED, error), error)
    elif not isinstance(error, Exception) and run.is_over_time():
        # A pool sends SIGTERM before SIGKILL at a hard time limit: that is a crash, or it would repeat for ever.
        run.phase = ENDED
    else:
        was_ours = give_back(run, error=error)
        is_taken = not was_ours and isinstance(error, Exception) and find_newer_claim(run)
        if not (was_ours or is_taken) and isinstance(error, errors.LeaseLost):
            run.phase = AGAIN  # it was forgotten or released: the key is free


def _is_final(run: Run, error: BaseException) -> bool:
    """Do duplicates get this error?

    Settling FAILED deletes the steps, which a client who repeats a failed request would run again: it is released.
    """
    if isinstance(error, (*run.control, errors.LeaseLost)) or not isinstance(error, Exception):
        return False
    return isinstance(error, run.policy.permanent_errors) or (run.keeps_failure and not run.steps)


def give_back(
    run: Run, *, requeue_ms: int | None = None, error: BaseException | None = None
) -> bool:
    """Give the key back, later if the store is away; ``False``: there was nothing to release.

    ``requeue_ms``: the call comes again within this time, or a sweep sends the record's message. Where ``error`` ends
    the process there is one try: at a hard time limit Celery sends SIGTERM, and 0.1 s later SIGKILL.
    """
    was_closed, run.shield.closed = run.shield.closed, True
    run.phase = RELEASED
    ends_process = error is not None and not isinstance(error, Exception)
    until = ONCE if ends_process else time.monotonic() + RELEASE_SECONDS
    free = partial(run.store.release, run.identity, token=run.token, requeue_ms=requeue_ms)
    try:
        released = _ask(run, until, free)
        if not (released or ends_process or isinstance(error, errors.LeaseLost)):
            # Released by a try whose answer was lost, unless a crash or an operator gave the key to another.
            found = run.store.get(run.identity)
            released = not (
                found is not None
                and found.token != run.token
                and (found.crashes > run.crashes or found.note)
            )
    except Exception as trouble:  # noqa: BLE001  of the store
        line = "idempotency: could not release %s yet, its lease ends it at the latest: %s"
        logger.warning(line, run.identity, trouble)
        if not ends_process:
            heartbeat.finish_later(free)
        return True
    else:
        if released:
            state = State.INTERRUPTED if run.steps else None  # None: it is deleted
            if requeue_ms is not None and (run.record.reserved or run.message is not None):
                state = State.QUEUED
            report(run, signals.released, run.record, state=state, error=error)
        return released
    finally:
        run.shield.leave(was_closed=was_closed)


def find_newer_claim(run: Run) -> bool:
    """Has the key a newer claim, of which this call is the duplicate? Report it."""
    with suppress(*errors.STORE_ERRORS):
        found = run.store.get(run.identity)
        if found is not None and found.token != run.token:  # else the key is free, or still ours
            _lose(run)
            return True
    return False


def _lose(run: Run) -> None:
    """Drop the result of this run: the call goes on as a duplicate of the newer claim."""
    observed = run.policy.mode == "observe"
    run.phase = ENDED if observed else AGAIN
    report(run, signals.lease_lost, run.record, observed=observed)


def _observe(run: Run, body: Body) -> object:
    """Run in any case; record, count and log what would have been a duplicate."""
    answer = _claim(run)
    if isinstance(answer, Claimed):
        return _run_body(run, answer.record, body)
    if isinstance(answer, errors.STORE_ERRORS):
        report(run, signals.store_failed, error=answer, observed=True)
    else:
        report(run, _OBSERVED[type(answer)], answer.record, observed=True)
    return _run_unguarded(run, body)


def unguarded(run: Run) -> Run:
    """Give ``run`` a claim that holds nothing: its token is 0, its steps just run."""
    run.phase = Phase.UNGUARDED
    run.record = Record(
        identity=run.identity, state=PROCESSING, token=0, created_ms=0, updated_ms=0
    )
    return run


def _run_unguarded(run: Run, body: Body) -> object:
    outer = current_run.set(unguarded(run))
    try:
        if run.in_transaction is not None:
            return run.in_transaction(run, body)
        run.shield.open()
        return body()
    finally:
        run.shield.closed = True
        run.phase = ENDED
        current_run.reset(outer)
