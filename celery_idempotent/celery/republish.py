"""Publishing a message again with a countdown: after a conflict, a store failure, or callbacks that were not sent."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from celery.exceptions import Ignore, Reject, Retry
from kombu import Exchange, Queue
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.serialization import registry  # type: ignore[attr-defined]  # kombu has it

from celery_idempotent import backoff
from celery_idempotent.celery import losses
from celery_idempotent.celery.typed import AnyTask, Options, Sig
from celery_idempotent.errors import InProgress
from celery_idempotent.keys.stamp import STAMP_HEADER, as_mapping, read_stamp, with_stamp
from celery_idempotent.protocol.run import Run
from celery_idempotent.records import Record, State

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

logger = logging.getLogger(__name__)

#: In a stamp: how often a message was republished for a conflict, a store failure, or callbacks that were not sent. The
#: user's ``max_retries`` is not consumed.
CONFLICTS, STORE_FAILURES, UNDELIVERED = "conflicts", "store_failures", "undelivered"
#: In a stamp: the token of the holder whose conflicts are counted.
HOLDER = "holder"

#: The longest countdown for each, in seconds.
_LONGEST = {CONFLICTS: 10.0, STORE_FAILURES: 60.0, UNDELIVERED: 60.0}

#: The longest pause, in seconds, after which a message that stays in its worker asks the protocol again.
_LONGEST_STAY = 30.0

#: Headers that brokers write. RabbitMQ drops a message that comes back with them as one that goes in a circle; kombu's
#: Redis transport takes it for restored from then on.
_OF_THE_BROKER = re.compile(
    "redelivered|x-death|x-(first|last)-death-.*|x-(delivery|acquired)-count"
)


class NotRepublishedError(Exception):
    """This message cannot be published again: it stays with its worker and asks again now."""


class DeliveredRun(Run):
    """A delivery, as this module and the callbacks see it."""

    task: Any
    request: Any
    #: The state of its record, whose callbacks Celery is to send.
    ended_as: State | None = None
    #: The token of the record to mark as delivered; ``None`` if another message settled it.
    mark_token: int | None = None
    #: Until then (monotonic) the record will surely answer the message, if it comes back.
    comes_back_until = 0.0
    #: As the message had it: the tracer of Celery < 5.7 takes its last step out.
    chain: list[object] | None = None


def conflict(run: DeliveredRun, record: Record, left_ms: int) -> NoReturn:
    """Another run holds the key, or its result is not stored yet: republish this copy, drop or fail it, by the policy.

    A redelivery of the holder's message is always republished, without a result state: it may be the broker's only
    copy, and its failure would fail the chord and chain of the holder's run.
    """
    request, on_conflict = run.request, run.policy.on_conflict
    is_redelivery = record.task_id == request.id
    if is_redelivery and losses.is_over(run.task, run.store, record):
        left_ms = 0
    left = left_ms / 1000
    found = f"held by {record.owner}, whose lease ends in {left:.1f} s unless it is renewed"
    if record.state.is_final:
        found = f"completed by task {record.task_id}, whose result is not in the result backend yet"
    message = f"{record.identity} is {found}."
    error = InProgress(message, record.task_id, left)
    if request.is_eager or (on_conflict == "raise" and not is_redelivery):
        raise error
    if on_conflict == "ignore" and not is_redelivery:
        logger.info("idempotency: %s[%s] is dropped: %s", run.task.name, request.id, error)
        if not request.ignore_result:
            backend: Any = run.task.backend
            with suppress(Exception):  # else it looks PENDING for ever
                backend.store_result(request.id, message, "IGNORED", request=request)
        raise Ignore(message)
    # The operation of a redelivery has begun before its expiry.
    how: Options = {"expires": None} if is_redelivery else {}
    line = "is republished with a countdown of %(countdown).1f s (conflict %(count)d): %(reason)s"
    how |= {"left": left, "holder": record.token}
    again = _republish(run, CONFLICTS, line, reason=message, **how)
    if is_redelivery:
        raise Ignore(message)
    raise Retry(message, exc=error, when=again.options["countdown"], sig=again)


def after_store_failure(run: DeliveredRun, error: Exception, *, begun: bool = False) -> NoReturn:
    """The store did not answer: republish this copy. ``begun``: an atomic run was rolled back, or is in doubt."""
    if run.request.is_eager:
        raise error
    line = "is not known to be done" if begun else "did not run"
    line += ": store error (%(count)d so far). It is republished with a countdown of %(countdown).1f s: %(reason)s"
    _republish(run, STORE_FAILURES, line, level=logging.ERROR, reason=error)
    # Not the error itself: its cause may not be picklable.
    raise Ignore(str(error))


def after_chord_claim(run: DeliveredRun) -> NoReturn:
    """A process, maybe a dead one, has claimed the chord of a finished task: republish until that claim ends."""
    line = "is done, and returns its part of a chord again in %(countdown).1f s"
    _republish(run, UNDELIVERED, line, expires=None)
    raise Ignore(f"the chord of {run.task.name} is claimed")


def come_back(run: DeliveredRun) -> bool:
    """Publish the message of a finished task again, to have its callbacks sent; ``False``: the broker refused it."""
    run.request.chain = run.chain
    try:
        _again(run, UNDELIVERED, expires=None).apply_async()
    except Exception:  # noqa: BLE001  brokers fail in their own ways
        return False
    return True


def _republish(
    run: DeliveredRun,
    counter: str,
    line: str,
    *,
    level: int = logging.INFO,
    reason: object = None,
    **how: Any,
) -> Sig:
    """Publish the message again, and log that. ``how``: see :func:`_again`."""
    again = _again(run, counter, **how)
    words = {"task": run.task.name, "id": run.request.id, "reason": reason}
    words["count"] = run.request.headers[STAMP_HEADER][counter]
    words["countdown"] = again.options["countdown"]
    logger.log(level, "idempotency: %(task)s[%(id)s] " + line, words)  # noqa: G003  a constant
    _publish_again(run, again)
    return again


def _again(
    run: DeliveredRun,
    counter: str,
    *,
    left: float | None = None,
    holder: int | None = None,
    **options: Any,
) -> Sig:
    """Return this message with a countdown, counted in its stamp; the count starts anew with another holder.

    While a countdown lasts, the message is not acknowledged: it stays well under the visibility timeout.
    """
    task, request = run.task, run.request
    headers = as_mapping(request.headers)
    known, more = read_stamp(headers, request.id), {} if holder is None else {HOLDER: holder}
    before = known.get(counter) if more.items() <= known.items() else 0
    more[counter] = count = before + 1 if isinstance(before, int) else 1
    # If publishing fails, this delivery asks again with this stamp.
    request.headers = with_stamp(headers, str(request.id), more=more)
    longest = min(_LONGEST[counter], unacknowledged_s(task))
    if left is not None:
        longest = min(longest, max(left, 0.1))
    delay = backoff.seconds(count, first=1.0, longest=longest)
    if task.app.pool.connection.transport.driver_type == "amqp":
        # For a quorum queue, which delays messages itself, Celery takes whole seconds.
        delay = max(math.ceil(delay), 1)
    return as_published(task, request, countdown=delay, **way_back(task.app, request), **options)


def as_published(task: AnyTask, request: Context, **options: Any) -> Sig:
    """Return a signature that publishes this message as it came in, with these ``options`` of ``apply_async``."""
    headers, properties = as_mapping(request.headers), as_mapping(request.properties)
    options["headers"] = {k: v for k, v in headers.items() if not _OF_THE_BROKER.fullmatch(k)}
    if delivery_mode := properties.get("delivery_mode"):
        options["delivery_mode"] = delivery_mode
    content_type = properties.get("content_type")
    if content_type in registry.type_to_name:
        options["serializer"] = registry.type_to_name[content_type]
    again: Sig = task.signature_from_request(
        request, retries=request.retries, add_to_parent=False, **options
    )
    return again


def unacknowledged_s(task: AnyTask) -> float:
    """Return for how many seconds a message may surely stay unacknowledged: a quarter of the visibility timeout."""
    broker = redelivery_timeout(task.app)
    return (3600.0 if broker is None else broker.seconds) / 4


def _publish_again(run: DeliveredRun, again: Sig) -> None:
    """Publish; a message that cannot be published must not be lost.

    In an outage of the broker, one with late acks is rejected after a pause, and the broker requeues it; once only, for
    RabbitMQ's quorum queues drop a message after 20 times. Otherwise it stays in this worker. If a soft time limit ends
    the pause, a message with late acks is requeued in any case.

    Raises:
        Reject: if the broker shall deliver it again.
        NotRepublishedError: after a pause, if it shall ask again here.
    """
    task, request, delay = run.task, run.request, again.options["countdown"]
    connection = task.app.pool.connection
    if is_broadcast(request) and connection.transport.driver_type == "redis":
        # Redis broadcasts with PUBLISH: one worker has no queue.
        if not run.shield.pause(min(delay, _LONGEST_STAY)):
            run.shield.open()
        raise NotRepublishedError
    try:
        again.apply_async()
        return
    except Exception as error:  # noqa: BLE001  of a broker, or a router
        of_broker = (OperationalError, LimitExceeded, OSError, *connection.connection_errors)
        is_outage, reason = isinstance(error, of_broker), type(error).__name__
    back = is_outage and task.acks_late and not as_mapping(request.delivery_info).get("redelivered")
    pause = 1.0 if back else min(max(delay, 1.0), _LONGEST_STAY)
    line = "idempotency: %s[%s] cannot be published, pausing %.0f s: %s"
    logger.error(line, task.name, request.id, pause, reason)
    if not run.shield.pause(pause):
        # By a soft time limit the task, which has not begun or is done, would fail: only the last copy does.
        back = task.acks_late
        if run.shield.ending or not back:
            run.shield.open()
    if back:
        raise Reject(reason, requeue=True)
    raise NotRepublishedError(reason)


# -- the queue that a delivery came from, and its copies go to --------------------------------------------------------
#
# A fanout exchange (kombu's ``Broadcast``) and a topic exchange may give a copy to several queues::
#
#     queue a ─ worker A: runs                               queue a ─ worker A: runs
#     queue b ─ worker B: Held ─ exchange ─┬─ queue a …      queue b ─ worker B: Held ─ queue b
#                                          └─ queue b …

#: In the properties of a request: its queue, which only the main process of a worker knows; whether it is a broadcast.
_QUEUE, _BROADCAST = "idempotency_queue", "idempotency_broadcast"


def origin(app: Celery, delivery_info: Mapping[str, object]) -> Options:
    """Return the properties that say where a delivery by an exchange with a name came from."""
    exchange, key = str(delivery_info["exchange"]), str(delivery_info.get("routing_key"))
    if exchange.startswith("celery_delayed_"):
        # Of a delay in RabbitMQ: the routing key has it in binary before it.
        exchange, key = "", re.sub(r"(?:[01]\.){28}", "", key)
    for name, queue in list(app.amqp.queues.consume_from.items()):
        for each in queue.bindings or (queue,):
            bound = each.exchange
            if bound is None or exchange not in ("", bound.name):
                continue
            if _matches(bound.type, each.routing_key or "", key):
                return {_QUEUE: name, _BROADCAST: bound.type == "fanout"}
    return {}


def _matches(kind: str, pattern: str, key: str) -> bool:
    """Does an exchange of this kind give a message with this routing key to the binding?"""
    if kind == "direct":
        return pattern == key
    if kind != "topic":
        return True
    # With a dot before each word: "#" also stands for no word at all.
    regex = re.escape(f".{pattern}").replace(r"\.\#", r"(?:\..*)?").replace(r"\*", r"[^.]*")
    return re.fullmatch(regex, f".{key}") is not None


def is_broadcast(request: Context) -> bool:
    """Does the exchange of this delivery give each message to all its queues?"""
    return bool((request.properties or {}).get(_BROADCAST))


def way_back(app: Celery, request: Context) -> Options:
    """Return the options that publish a copy to the queue of this delivery; none if that is not known."""
    info = as_mapping(request.delivery_info)
    name = as_mapping(request.properties).get(_QUEUE)
    if name is None and info.get("exchange") == "":
        name = info.get("routing_key")
    if not name:
        return {}
    only = Queue(str(name), Exchange(type="direct"), routing_key=str(name), no_declare=True)
    # Explicit, because those of task_routes would come before those of the queue.
    options: Options = {"queue": only, "exchange": "", "routing_key": only.name}
    if name in app.amqp.queues:
        options["declare"] = [app.amqp.queues[str(name)]]
    return options


# -- how long a broker waits for an acknowledgement -------------------------------------------------------------------


class RedeliveryTimeout(NamedTuple):
    """After ``seconds`` a dead worker's message is delivered again; ``option`` of the transport sets them."""

    option: str
    seconds: float


#: The option of kombu's transports, and its default. All others notice that a connection is gone, or never redeliver.
_TRANSPORTS = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), ("visibility_timeout", 3600.0)),
    **dict.fromkeys(("sqs", "pgmq"), ("visibility_timeout", 1800.0)),
    "gcpubsub": ("ack_deadline_seconds", 240.0),
    "azureservicebus": ("peek_lock_seconds", 60.0),
}


def redelivery_timeout(app: Celery) -> RedeliveryTimeout | None:
    """Return how long the broker that the app reads from waits; ``None``: it redelivers at once or never."""
    url = cast("object", app.conf.broker_read_url)  # its stub knows one URL only
    first = url[0] if isinstance(url, (list, tuple)) and url else url
    scheme = str(first or "").partition("://")[0].partition("+")[0].lower()
    if scheme not in _TRANSPORTS:
        return None
    option, default = _TRANSPORTS[scheme]
    given = (app.conf.broker_transport_options or {}).get(option)
    return RedeliveryTimeout(option, float(given or default))  # may be text, as in a URL's query
