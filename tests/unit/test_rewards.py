"""Totals, advantages, filters: each rule, and that a failure is never a number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import run

from rollstream.shared import rewards
from rollstream.shared.arrays import pack
from rollstream.shared.config import ConfigError
from rollstream.shared.records import EnvRef, RewardPart, Row, Sample, Scored, Sequence, Stop, Usage
from rollstream.shared.runs import Filters, Teacher

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def group(*values, stops=None, tokens=3, k=None) -> Scored:
    stops = stops or [Stop.STOP] * len(values)
    return Scored(
        run="r", pipeline="rl", n=0, k=k or len(values), env=EnvRef("e"), row=Row(prompt=[]),
        samples=[
            Sample(i=i, stop=stop, reward=value, usage=Usage(completion_tokens=tokens),
                   sequences=[Sequence(tokens=pack(range(tokens), "int32"),
                                       mask=pack([1] * tokens, "uint8"))])
            for i, (value, stop) in enumerate(zip(values, stops, strict=True))
        ],
    )


@given(numbers)
def test_mean_centred_sums_to_nothing(values):
    assert math.isclose(math.fsum(rewards.mean_centred(values)), 0, abs_tol=1e-9)


@given(numbers)
def test_standardised_has_unit_deviation_or_is_zero(values):
    out = rewards.standardised(values)
    spread = math.sqrt(math.fsum(v * v for v in out) / len(out))
    assert math.isclose(spread, 1, rel_tol=1e-6) or all(v == 0 for v in out)


@given(numbers)
def test_leave_one_out_is_the_mean_of_the_others(values):
    for i, advantage in enumerate(rewards.leave_one_out(values)):
        others = values[:i] + values[i + 1:]
        baseline = math.fsum(others) / len(others) if others else values[i]
        assert math.isclose(advantage, values[i] - baseline, abs_tol=1e-6)


def test_the_total_is_the_plain_weighted_sum():
    parts = [RewardPart("a", 1.0, 1.0), RewardPart("b", 1.0, 1.0), RewardPart("c", 2.0, -0.5)]
    assert rewards.total(parts) == 1.0


def test_a_sample_without_reward_gets_no_advantage():
    scored = group(1.0, None, stops=[Stop.STOP, Stop.ERROR])
    rewards.set_advantages(scored.samples, rewards.mean_centred)
    assert [s.advantage for s in scored.samples] == [0.0, None]


@pytest.mark.parametrize(("scored", "config", "reason"), [
    (group(1.0, 0.0), run(), None),
    (group(1.0, 1.0), run(), "zero_variance"),
    (group(1.0, 1.0), run("sft"), None),
    (group(1.0, 1.0), run(teacher=Teacher(endpoint="t", model="m")), None),
    (group(1.0), run(), None),
    (group(1.0, 1.0), run(filters=Filters(zero_variance="off")), None),
    (group(1.0, 1.0), run("sft", filters=Filters(zero_variance="on")), "zero_variance"),
    (group(1.0, None, stops=[Stop.STOP, Stop.ERROR]), run(), "error"),
    (group(1.0, None, stops=[Stop.STOP, Stop.TIMEOUT]), run("sft"), "timeout"),
    (group(1.0, None, stops=[Stop.STOP, Stop.ERROR]), run("eval"), None),
    (group(1.0, None, stops=[Stop.STOP, Stop.CANCELLED]), run("eval"), "cancelled"),
    (group(1.0, None, stops=[Stop.STOP, Stop.ERROR]),
     run(group_policy="min_viable", min_viable=1, filters=Filters(zero_variance="off")), None),
    (group(1.0, None, stops=[Stop.STOP, Stop.ERROR]),
     run(group_policy="min_viable", min_viable=2), "below_min_viable"),
    (group(1.0, 0.0, stops=[Stop.STOP, Stop.LENGTH]), run(), None),
    (group(1.0, 0.0, k=3), run(), "incomplete"),
    (group(1.0, 0.0, tokens=9), run(filters=Filters(max_sequence_tokens=8)), "overlong"),
    (group(1.0, 0.0, tokens=8), run(filters=Filters(max_sequence_tokens=8)), None),
    (group(1.0, 0.0, tokens=9), run("sft", filters=Filters(max_sequence_tokens=8)), None),
    (group(1.0, 0.0), run(filters=Filters(min_completion_tokens=4)), "too_short"),
])
def test_each_drop_has_its_reason(scored, config, reason):
    assert rewards.drop_reason(scored, config) == reason


def test_a_users_own_advantage_function():
    assert rewards.advantage_function("statistics:fmean") is not None
    assert rewards.advantage_function("none") is None
    for name in ("meen", "statistics:nothing", "no_such_module:f"):
        with pytest.raises(ConfigError, match=name):
            rewards.advantage_function(name)
