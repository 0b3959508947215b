"""What a service says of itself: log lines, and traces through Kafka.

Log lines are JSON on stderr, or for people where stderr is a terminal. Traces leave only where
`OTEL_EXPORTER_OTLP_ENDPOINT` is set; without it a span costs microseconds and a record's
`traceparent` is still passed on. Span names and attributes follow OpenTelemetry's semantic
conventions for messaging 1.44 (`process {topic}`, `send {topic}`), written out here because the
Python constants are still the old ones.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollstream.shared.codec import Headers

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
REPEAT_AFTER_S = 10.0
_REMEMBERED = 256

_record_log = structlog.get_logger("rollstream.record")
_tracer = trace.get_tracer("rollstream")
_propagator = TraceContextTextMapPropagator()


def configure_logging(service: str, level: str = "info", json: bool | None = None) -> None:
    """Send structlog's and the standard library's log lines to stderr; may be called again.

    `json` None: for people where stderr is a terminal, else JSON.
    """
    if json is None:
        json = not sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace,
    ]
    if json:
        render: list[Any] = [
            structlog.processors.format_exc_info,
            _add_service(service),
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        render = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(QuietClient())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The client tells of every subscription and assignment at info; ours says it once.
    logging.getLogger("aiokafka").setLevel("DEBUG" if level == "debug" else "WARNING")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _to_json(event: dict[str, Any], **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _add_service(service: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["service"] = service
        return event

    return add


def _add_trace(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event


class QuietClient(logging.Filter):
    """Makes the Kafka client's log readable.

    A member that learns of a rebalance by its heartbeat is ordinary: shown at debug only. A broker
    that is down is reported about five times a second: the same line passes once in 10 s, with the
    number that were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("aiokafka") or record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        if "because it is rebalancing" in text:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return logging.getLogger().isEnabledFor(logging.DEBUG)
        since, left_out = self._seen.get((record.name, text), (float("-inf"), 0))
        if record.created - since < REPEAT_AFTER_S:
            self._seen[record.name, text] = (since, left_out + 1)
            return False
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[record.name, text] = (record.created, 0)
        if left_out:
            record.msg, record.args = f"{text} ({left_out} more like this)", None
        return True


def log_record(
    *, stage: str, topic: str, partition: int, offset: int, run: str, group: int,
    duration_s: float, outcome: str, **more: Any,
) -> None:
    """The one line that each record leaves behind, `more` for what the stage adds (tokens, ...)."""
    _record_log.info(
        "record", stage=stage, topic=topic, partition=partition, offset=offset, run=run,
        group=group, duration_s=round(duration_s, 4), outcome=outcome, **more,
    )


class _HeaderGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return [v.decode("ascii", "replace") for k, v in carrier if k == key] or None

    def keys(self, carrier: Headers) -> list[str]:
        return [key for key, _ in carrier]


class _HeaderSetter(Setter[Headers]):
    def set(self, carrier: Headers, key: str, value: str) -> None:
        carrier[:] = [(k, v) for k, v in carrier if k != key]
        carrier.append((key, value.encode("ascii")))


_getter, _setter = _HeaderGetter(), _HeaderSetter()


def inject(headers: Headers, context: Context | None = None) -> Headers:
    """Put the trace context (the current one) into the headers, in place, and return them."""
    _propagator.inject(headers, context, _setter)
    return headers


def extract(headers: Headers) -> Context:
    """The trace context in the headers; an empty one where there is none, or a broken one."""
    return _propagator.extract(headers, Context(), _getter)


def configure_tracing(service: str, endpoint: str | None = None) -> bool:
    """Send spans by OTLP over HTTP to `endpoint`, by default the variable's; whether any are sent.

    Once per process, before the first span; the exporter is imported only where there is an
    endpoint. Raises ModuleNotFoundError with the name of the extra where it is missing.
    """
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE)
    if not endpoint:
        return False
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(otlp_exporter("traces", endpoint)))
    trace.set_tracer_provider(provider)
    return True


def otlp_exporter(signal: Literal["traces", "metrics"], endpoint: str) -> Any:
    """An exporter to `<endpoint>/v1/<signal>`.

    Raises ModuleNotFoundError naming the extra.
    """
    try:
        if signal == "traces":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                OTLPSpanExporter as Exporter,
            )
        else:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
                OTLPMetricExporter as Exporter,
            )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{ENDPOINT_VARIABLE} = {endpoint}: pip install 'rollstream[otlp]', or unset it"
        ) from error
    return Exporter(endpoint=f"{endpoint.rstrip('/')}/v1/{signal}")


def _tracing() -> bool:
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@contextmanager
def process_span(
    topic: str, partition: int, offset: int, headers: Headers, *, group: str | None = None
) -> Iterator[Span]:
    """Work on one record: a child of the span that sent it, so that a sample is one trace.

    `group` is the consumer group. An exception that leaves the block marks the span as failed.
    """
    if not _tracing() and all(key != "traceparent" for key, _ in headers):
        yield trace.INVALID_SPAN
        return
    parent = extract(headers)
    sender = trace.get_current_span(parent).get_span_context()
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": str(partition),
        "messaging.kafka.offset": offset,
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    with _tracer.start_as_current_span(
        f"process {topic}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes,
        links=[Link(sender)] if sender.is_valid else None,
    ) as span:
        yield span


@contextmanager
def send_span(topic: str, partition: int, headers: Headers) -> Iterator[Span]:
    """Sending one record, until it is acknowledged; puts the span's context into the headers."""
    if not _tracing():
        inject(headers)
        yield trace.INVALID_SPAN
        return
    attributes = {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": str(partition),
    }
    with _tracer.start_as_current_span(
        f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes
    ) as span:
        inject(headers)
        yield span


@contextmanager
def model_span(operation: str, model: str, provider: str) -> Iterator[Span]:
    """A request to an inference server: `chat MODEL` (OpenTelemetry GenAI conventions 0.1)."""
    with _tracer.start_as_current_span(
        f"{operation} {model}", kind=SpanKind.CLIENT,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
        },
    ) as span:
        yield span
