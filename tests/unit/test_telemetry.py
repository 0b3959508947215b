import asyncio
import io
import json
import logging
import os
import subprocess
import sys

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollstream.shared import telemetry
from rollstream.shared.telemetry import QuietClient

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stderr_logs(monkeypatch):
    """The lines that went to stderr, as dicts; logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    telemetry.configure_logging("scorer", "info", json=True)
    yield lambda: [json.loads(line) for line in stderr.getvalue().splitlines()]
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="module")
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def line(name, text, created, level=logging.WARNING):
    record = logging.LogRecord(name, level, "", 0, text, None, None)
    record.created = created
    return record


def test_one_canonical_line_a_record(stderr_logs):
    telemetry.log_record(
        stage="scorer", topic="rs.r.rl.rollouts", partition=3, offset=17, run="r", group=5,
        duration_s=0.123456, outcome="scored", tokens=9,
    )
    [event] = stderr_logs()
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "record", "level": "info", "logger": "rollstream.record", "service": "scorer",
        "stage": "scorer", "topic": "rs.r.rl.rollouts", "partition": 3, "offset": 17, "run": "r",
        "group": 5, "duration_s": 0.1235, "outcome": "scored", "tokens": 9,
    }


def test_standard_library_lines_and_exceptions_are_json_too(stderr_logs):
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("some.library").exception("it broke: %s", 7)
    [event] = stderr_logs()
    assert (event["event"], event["level"], event["service"]) == ("it broke: 7", "error", "scorer")
    assert "ValueError: bad" in event["exception"]


def test_a_value_that_json_does_not_know_never_breaks_a_line(stderr_logs):
    telemetry.log_record(
        stage="s", topic="t", partition=0, offset=0, run="r", group=0, duration_s=0, outcome="x",
        odd=object,
    )
    assert stderr_logs()[0]["odd"] == "<class 'object'>"


def test_a_rebalance_is_not_a_warning(stderr_logs):
    coordinator = logging.getLogger("aiokafka.consumer.group_coordinator")
    coordinator.warning("Heartbeat failed for group %s because it is rebalancing", "g")
    coordinator.warning("Heartbeat failed for group %s: generation id is not  current.", "g")
    assert [e["event"] for e in stderr_logs()] == [
        "Heartbeat failed for group g: generation id is not  current."
    ]


def test_a_broker_that_is_down_is_said_once_in_ten_seconds():
    quiet = QuietClient()
    passed = []
    for tick in range(110):  # five times a second for 22 s
        record = line("aiokafka", "Unable connect to node with id 1", tick / 5, logging.ERROR)
        if quiet.filter(record):
            passed.append((tick / 5, record.getMessage()))
    assert [at for at, _ in passed] == [0.0, 10.0, 20.0]
    assert passed[1][1] == "Unable connect to node with id 1 (49 more like this)"


def test_other_lines_are_never_held_back():
    quiet = QuietClient()
    assert all(quiet.filter(line("rollstream", "same", 1.0)) for _ in range(3))
    assert all(quiet.filter(line("aiokafka", f"different {i}", 1.0)) for i in range(1000))
    assert len(quiet._seen) <= 256


def test_trace_context_travels_through_headers():
    headers = [("content-type", b"application/json"), ("traceparent", TRACEPARENT.encode())]
    context = telemetry.extract(headers)
    out = telemetry.inject([("traceparent", b"old"), ("other", b"1")], context)
    assert out == [("other", b"1"), ("traceparent", TRACEPARENT.encode())]


@pytest.mark.parametrize("value", [b"", b"garbage", b"\xff\xfe", b"00-0-0-0"])
def test_a_broken_traceparent_is_no_trace(value):
    context = telemetry.extract([("traceparent", value)])
    assert not trace.get_current_span(context).get_span_context().is_valid


def test_no_endpoint_no_tracing(monkeypatch):
    monkeypatch.delenv(telemetry.ENDPOINT_VARIABLE, raising=False)
    assert telemetry.configure_tracing("generator") is False


@pytest.mark.parametrize("incoming", [[], [("traceparent", TRACEPARENT.encode())]])
def test_without_an_exporter_the_trace_is_still_passed_on(incoming):
    program = (
        "from rollstream.shared import telemetry as t\n"
        f"with t.process_span('a', 0, 0, {incoming!r}), t.send_span('b', 0, sent := []): pass\n"
        "import sys; print(sent); assert 'opentelemetry.sdk' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.strip() == repr(incoming)


def test_one_trace_a_sample_over_two_stages(spans):
    spans.clear()
    headers = [("traceparent", TRACEPARENT.encode())]
    with (
        telemetry.process_span("prompts", 2, 7, headers, group="g"),
        telemetry.model_span("chat", "smol", "vllm"),
    ):
        pass
    with (
        telemetry.process_span("prompts", 2, 8, headers),
        telemetry.send_span("rollouts", 2, sent := []),
    ):
        pass
    with (
        pytest.raises(RuntimeError),
        telemetry.process_span("rollouts", 2, 1, sent),
    ):
        raise RuntimeError("poison")
    done = {(s.name, s.attributes.get("messaging.kafka.offset")): s
            for s in spans.get_finished_spans()}
    assert {f"{s.context.trace_id:032x}" for s in done.values()} == {TRACEPARENT.split("-")[1]}
    first = done["process prompts", 7]
    assert f"{first.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert first.links[0].context.span_id == first.parent.span_id
    assert first.kind is trace.SpanKind.CONSUMER
    assert first.attributes["messaging.destination.partition.id"] == "2"
    assert done["chat smol", None].parent.span_id == first.context.span_id
    send = done["send rollouts", None]
    assert send.kind is trace.SpanKind.PRODUCER
    assert done["process rollouts", 1].parent.span_id == send.context.span_id
    assert done["process rollouts", 1].status.status_code is trace.StatusCode.ERROR


async def test_spans_and_numbers_leave_by_otlp_where_an_endpoint_is_set():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    seen = []

    async def take(request):
        seen.append((request.path, await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/{signal}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    program = (
        "from opentelemetry import metrics as m, trace\n"
        "from rollstream.shared import metrics, telemetry\n"
        "assert telemetry.configure_tracing('scorer'); metrics.configure_metrics('scorer')\n"
        "metrics.Metrics('rl', 'scorer').consumed('rollouts')\n"
        "with telemetry.process_span('rollouts', 0, 0, []): pass\n"
        "trace.get_tracer_provider().shutdown(); m.get_meter_provider().shutdown()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program,
        env=os.environ | {
            telemetry.ENDPOINT_VARIABLE: f"http://127.0.0.1:{runner.addresses[0][1]}",
            "NO_PROXY": "127.0.0.1",
        },
    )
    assert await asyncio.wait_for(process.wait(), 30) == 0
    await runner.cleanup()
    bodies = dict(seen)
    assert b"process rollouts" in bodies["/v1/traces"]
    assert b"rollstream.records.consumed" in bodies["/v1/metrics"]
