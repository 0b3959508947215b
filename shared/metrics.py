"""Every number that a service counts, by name, and the few calls that count them.

Labels are pipeline, stage, topic, status and env only (`outcome` and `reason` for ends): small
fixed sets, never an id. In Prometheus the dots become underscores, a counter ends in `_total` and
a unit of seconds in `_seconds`: `rollstream_records_consumed_total`.

Without `configure_metrics` every call is a no-op.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Final, Literal

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from rollstream.shared.telemetry import ENDPOINT_VARIABLE, otlp_exporter

CONSUMED: Final = "rollstream.records.consumed"
"""Counter {pipeline, stage, topic}: records read as work, duplicates included."""
PRODUCED: Final = "rollstream.records.produced"
"""Counter {pipeline, stage, topic}: records acknowledged by the broker."""
FAILED: Final = "rollstream.records.failed"
"""Counter {pipeline, stage, topic, status}: records a step gave up on; status = kind of failure."""
IGNORED: Final = "rollstream.records.ignored"
"""Counter {pipeline, stage, topic, status}: records read and passed over: duplicate, late, ..."""
STEP_DURATION: Final = "rollstream.step.duration"
"""Histogram in seconds {pipeline, stage, status}: one step, retries included."""
ENDED: Final = "rollstream.groups.ended"
"""Counter {pipeline, stage, outcome, reason}: groups that ended at a leaf."""
REWARD: Final = "rollstream.reward"
"""Histogram {pipeline, stage, env}: rewards of samples; a failure has none and is not here."""
STALENESS: Final = "rollstream.policy.staleness"
"""Histogram in versions {pipeline, stage}: age of a group when it was handed out."""
TOKENS: Final = "rollstream.tokens"
"""Counter {pipeline, stage, status}: status = prompt, completion or cached."""

Gauge = Literal[
    "rollstream.in_flight",
    "rollstream.lag",
    "rollstream.commit.lag",
    "rollstream.frontier",
    "rollstream.groups.open",
    "rollstream.groups.in_flight",
    "rollstream.groups.oldest",
    "rollstream.policy.version",
    "rollstream.no_progress",
    "rollstream.event_loop.lag",
]
IN_FLIGHT: Final = "rollstream.in_flight"
"""Gauge {pipeline, stage}: records dispatched and not done."""
LAG: Final = "rollstream.lag"
"""Gauge {pipeline, stage, topic}: records between the read position and the end."""
COMMIT_LAG: Final = "rollstream.commit.lag"
"""Gauge {pipeline, stage, topic}: records between the committed offset and the read position."""
FRONTIER: Final = "rollstream.frontier"
"""Gauge {pipeline, stage, topic}: sum of the offsets below which everything is done."""
GROUPS_OPEN: Final = "rollstream.groups.open"
"""Gauge {pipeline, stage}: groups that wait for siblings."""
GROUPS_IN_FLIGHT: Final = "rollstream.groups.in_flight"
"""Gauge {pipeline, stage}: issued and not ended (producer)."""
OLDEST_GROUP: Final = "rollstream.groups.oldest"
"""Gauge in seconds {pipeline, stage}: age of the oldest group in flight (producer)."""
POLICY_VERSION: Final = "rollstream.policy.version"
"""Gauge {pipeline, stage}: the newest version that was announced."""
NO_PROGRESS: Final = "rollstream.no_progress"
"""Gauge in seconds {pipeline, stage}: how long a stage with work has got nothing done."""
EVENT_LOOP_LAG: Final = "rollstream.event_loop.lag"
"""Gauge in seconds: how late the event loop woke up last."""

_GAUGES: dict[Gauge, str] = {
    IN_FLIGHT: "", LAG: "", COMMIT_LAG: "", FRONTIER: "", GROUPS_OPEN: "", GROUPS_IN_FLIGHT: "",
    OLDEST_GROUP: "s", POLICY_VERSION: "", NO_PROGRESS: "s",
    EVENT_LOOP_LAG: "s",
}
_STEP_BOUNDS_S = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800]
# None below 0: Prometheus leaves out a histogram's sum, and so the mean, where a bound is negative.
_REWARD_BOUNDS = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5]
_STALENESS_BOUNDS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32]

_meter = metrics.get_meter("rollstream")
_consumed = _meter.create_counter(CONSUMED)
_produced = _meter.create_counter(PRODUCED)
_failed = _meter.create_counter(FAILED)
_ignored = _meter.create_counter(IGNORED)
_ended = _meter.create_counter(ENDED)
_tokens = _meter.create_counter(TOKENS)
_step_duration = _meter.create_histogram(
    STEP_DURATION, unit="s", explicit_bucket_boundaries_advisory=_STEP_BOUNDS_S
)
_reward = _meter.create_histogram(REWARD, explicit_bucket_boundaries_advisory=_REWARD_BOUNDS)
_staleness = _meter.create_histogram(
    STALENESS, explicit_bucket_boundaries_advisory=_STALENESS_BOUNDS
)

_Labels = tuple[tuple[str, str], ...]
_readings: dict[Gauge, list[tuple[_Labels, Callable[[], float | None]]]] = {g: [] for g in _GAUGES}


def _observe(name: Gauge) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        sums: dict[_Labels, float] = {}
        for labels, reading in list(_readings[name]):
            # A loop that is just ending must not take the other loops' numbers with it.
            with contextlib.suppress(Exception):
                if (value := reading()) is not None:
                    sums[labels] = sums.get(labels, 0) + value
        return [Observation(value, dict(labels)) for labels, value in sums.items()]

    return read


for _name, _unit in _GAUGES.items():
    _meter.create_observable_gauge(_name, [_observe(_name)], unit=_unit)


class Metrics:
    """What one stage of one pipeline counts.

    Several runs in a process count into the same numbers: a run is no label.
    """

    def __init__(self, pipeline: str, stage: str) -> None:
        self._labels = {"pipeline": pipeline, "stage": stage}

    def consumed(self, topic: str, n: int = 1) -> None:
        _consumed.add(n, {**self._labels, "topic": topic})

    def produced(self, topic: str, n: int = 1) -> None:
        _produced.add(n, {**self._labels, "topic": topic})

    def failed(self, topic: str, status: str, n: int = 1) -> None:
        _failed.add(n, {**self._labels, "topic": topic, "status": status})

    def ignored(self, topic: str, status: str, n: int = 1) -> None:
        _ignored.add(n, {**self._labels, "topic": topic, "status": status})

    def step(self, status: str, seconds: float) -> None:
        _step_duration.record(seconds, {**self._labels, "status": status})

    def ended(self, outcome: str, reason: str = "", n: int = 1) -> None:
        _ended.add(n, {**self._labels, "outcome": outcome, "reason": reason})

    def reward(self, env: str, value: float) -> None:
        _reward.record(value, {**self._labels, "env": env})

    def staleness(self, versions: int) -> None:
        _staleness.record(versions, self._labels)

    def tokens(self, status: Literal["prompt", "completion", "cached"], n: int) -> None:
        _tokens.add(n, {**self._labels, "status": status})

    def gauge(
        self, name: Gauge, read: Callable[[], float | None], *, topic: str = ""
    ) -> Callable[[], None]:
        """Read this gauge by calling `read` (None: nothing to say); the answer unregisters it.

        Readings with the same labels are added up. Read from a scrape: it must be quick.
        """
        labels = {**self._labels, "topic": topic} if topic else self._labels
        entry = (tuple(labels.items()), read)
        _readings[name].append(entry)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                _readings[name].remove(entry)

        return stop


def configure_metrics(service: str, endpoint: str | None = None) -> None:
    """Start counting for `exposition`, and by OTLP where `endpoint` or its variable is set.

    Once per process; later calls change nothing.
    Raises ModuleNotFoundError with the name of the extra where the OTLP exporter is missing.
    """
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    if isinstance(metrics.get_meter_provider(), MeterProvider):
        return
    readers: list[MetricReader] = [PrometheusMetricReader(scope_info_enabled=False)]
    if endpoint := endpoint or os.environ.get(ENDPOINT_VARIABLE):
        readers.append(PeriodicExportingMetricReader(otlp_exporter("metrics", endpoint)))
    resource = Resource.create({"service.name": service})
    metrics.set_meter_provider(MeterProvider(metric_readers=readers, resource=resource))


def exposition() -> tuple[bytes, str]:
    """All numbers of this process as Prometheus text, and its content type."""
    import prometheus_client

    return prometheus_client.generate_latest(), prometheus_client.CONTENT_TYPE_LATEST
