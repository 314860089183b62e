"""Outcomes on the current OpenTelemetry span."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_idempotent import IdempotentTask, signals, tracing

Traced = Callable[..., ReadableSpan]
NAME = "celery.idempotency"


@pytest.fixture
def traced() -> Iterator[Traced]:
    """Run something in a span, and return the span."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    tracing.install()

    def run(call: Callable[[], object]) -> ReadableSpan:
        exporter.clear()
        with tracer.start_as_current_span("run"):
            call()
        (span,) = exporter.get_finished_spans()
        return span

    yield run
    provider.shutdown()
    for name, outcome in signals.OUTCOMES.items():
        assert outcome.disconnect(dispatch_uid=f"{tracing.__name__}.{name}")


@pytest.fixture
def pay(app: Celery) -> Any:
    @app.task(
        base=IdempotentTask,
        name="pay",
        idempotency_key="order",
        idempotency_permanent_errors=(ValueError,),
        idempotency_fingerprint=None,
        shared=False,
    )
    def pay(order: str, error: Exception | None = None) -> str:
        if error is not None:
            raise error
        return "receipt"

    return pay


def test_a_run_and_its_repetition(pay: Any, traced: Traced) -> None:
    first = traced(lambda: pay.apply(("secret-17",), task_id="one"))
    assert [event.name for event in first.events] == [f"{NAME}.claimed", f"{NAME}.settled"]
    assert first.attributes is not None
    assert first.attributes["celery.idempotency.outcome"] == "settled"
    assert first.attributes["celery.idempotency.state"] == "COMPLETED"
    assert "celery.idempotency.first_task_id" not in first.attributes

    again = traced(lambda: pay.apply(("secret-17",), task_id="two"))
    assert [event.name for event in again.events] == [f"{NAME}.replayed"]
    assert again.attributes is not None
    assert again.attributes["celery.idempotency.first_task_id"] == "one"
    assert again.attributes["celery.idempotency.state"] == "COMPLETED"
    digest = "celery.idempotency.key_digest"
    assert again.attributes[digest] == first.attributes[digest]
    other = traced(lambda: pay.apply(("secret-18",)))
    assert (other.attributes or {})[digest] != first.attributes[digest]
    assert "secret" not in str([first.to_json(), again.to_json()])


def test_an_error_is_named_by_its_class(pay: Any, traced: Traced) -> None:
    span = traced(lambda: pay.apply(("17", ValueError("card of Ada expired"))))
    assert span.attributes is not None
    assert span.attributes["error.type"] == "ValueError"
    assert span.attributes["celery.idempotency.state"] == "FAILED"
    assert "Ada" not in span.to_json()


def test_with_a_log_provider_events_are_log_records(
    pay: Any, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemoryLogRecordExporter(), LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    monkeypatch.setattr(tracing, "_events", provider.get_logger("test"))
    span = traced(lambda: pay.apply(("17",)))
    found = [each.log_record for each in exporter.get_finished_logs()]
    assert [each.event_name for each in found] == [f"{NAME}.claimed", f"{NAME}.settled"]
    assert {each.span_id for each in found} == {span.context.span_id}
    states = [(each.attributes or {})[f"{NAME}.state"] for each in found]
    assert states == ["PROCESSING", "COMPLETED"]
    assert span.events == ()
    provider.shutdown()
