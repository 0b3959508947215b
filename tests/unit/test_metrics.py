import pytest

from rollstream.shared import metrics
from rollstream.shared.metrics import Metrics


@pytest.fixture(autouse=True)
def _counting():
    metrics.configure_metrics("test")


def values(name, pipeline):
    """The samples of one metric and pipeline as {labels without pipeline: value}."""
    text, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    found = {}
    for row in text.decode().splitlines():
        if row.startswith(name + "{") and f'pipeline="{pipeline}"' in row:
            labels, _, value = row[len(name) + 1:].rpartition("} ")
            rest = sorted(p for p in labels.split(",") if not p.startswith("pipeline="))
            found[",".join(rest)] = float(value)
    return found


def test_counters_have_the_documented_names_and_labels():
    m = Metrics("count", "scorer")
    m.consumed("rollouts")
    m.consumed("rollouts", 4)
    m.produced("scored", 2)
    m.failed("rollouts", "timeout")
    m.ignored("rollouts", "duplicate", 3)
    m.ended("dropped", "zero_variance")
    m.tokens("completion", 77)
    assert values("rollstream_records_consumed_total", "count") == {
        'stage="scorer",topic="rollouts"': 5
    }
    assert values("rollstream_records_produced_total", "count") == {
        'stage="scorer",topic="scored"': 2
    }
    assert values("rollstream_records_failed_total", "count") == {
        'stage="scorer",status="timeout",topic="rollouts"': 1
    }
    assert values("rollstream_records_ignored_total", "count") == {
        'stage="scorer",status="duplicate",topic="rollouts"': 3
    }
    assert values("rollstream_groups_ended_total", "count") == {
        'outcome="dropped",reason="zero_variance",stage="scorer"': 1
    }
    assert values("rollstream_tokens_total", "count") == {
        'stage="scorer",status="completion"': 77
    }


def test_histograms_reach_as_far_as_generations_take():
    m = Metrics("hist", "generator")
    m.step("ok", 700.0)
    m.reward("sums", 0.6)
    m.staleness(3)
    buckets = values("rollstream_step_duration_seconds_bucket", "hist")
    assert buckets['le="600",stage="generator",status="ok"'] == 0
    assert buckets['le="1200",stage="generator",status="ok"'] == 1
    assert values("rollstream_reward_sum", "hist") == {'env="sums",stage="generator"': 0.6}
    assert values("rollstream_policy_staleness_count", "hist") == {'stage="generator"': 1}


def test_gauges_of_several_runs_add_up_until_they_end():
    m = Metrics("gauge", "generator")
    first = m.gauge(metrics.IN_FLIGHT, lambda: 3)
    m.gauge(metrics.IN_FLIGHT, lambda: 4)
    m.gauge(metrics.IN_FLIGHT, lambda: 1 // 0)
    m.gauge(metrics.LAG, lambda: None, topic="prompts")
    name = "rollstream_in_flight"
    assert values(name, "gauge") == {'stage="generator"': 7}
    first()
    first()
    assert values(name, "gauge") == {'stage="generator"': 4}
    assert values("rollstream_lag", "gauge") == {}


def test_the_event_loop_lag_is_in_seconds():
    Metrics("loop", "x").gauge(metrics.EVENT_LOOP_LAG, lambda: 0.25)
    assert values("rollstream_event_loop_lag_seconds", "loop") == {'stage="x"': 0.25}
