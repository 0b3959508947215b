"""From rewards to advantages, and which groups are worth keeping: pure functions.

The total is verifiers' plain weighted sum. Advantages follow GRPO (arXiv:2402.03300: centred on the
group's mean, `std` divides by the standard deviation too) or RLOO (arXiv:2402.14740: against the
mean of the others).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

from rollstream.shared.config import ConfigError
from rollstream.shared.records import RETENTION, Kind, RewardPart, Sample, Scored, Stop
from rollstream.shared.runs import RunConfig

Advantages = Callable[[Sequence[float]], Sequence[float]]


def total(parts: Sequence[RewardPart]) -> float:
    """The weighted sum of a sample's reward parts."""
    return math.fsum(part.value * part.weight for part in parts)


def mean_centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """Mean-centred, divided by the group's standard deviation; zeros where that is 0."""
    centred = mean_centred(rewards)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / deviation if deviation > 0 else 0.0 for c in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Each reward against the mean of the others; 0 for a group of one."""
    if len(rewards) == 1:
        return [0.0]
    whole, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (whole - reward) / others for reward in rewards]


_BUILTIN: dict[str, Advantages] = {
    "mean": mean_centred, "std": standardised, "rloo": leave_one_out,
}


def advantage_function(name: str) -> Advantages | None:
    """`mean`, `std`, `rloo`, `none` (None), or a user's `module:function`.

    Raises ConfigError for a name that is none of these or can't be imported.
    """
    if name == "none":
        return None
    if name in _BUILTIN:
        return _BUILTIN[name]
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError("advantage", name, "use mean, std, rloo, none or module:function")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError("advantage", name, f"make it importable ({error})") from error


def set_advantages(samples: Sequence[Sample], function: Advantages | None) -> None:
    """Fill in the advantages of the samples that have a reward; the others get none."""
    rewarded = [sample for sample in samples if sample.reward is not None]
    if function is None or not rewarded:
        return
    values = function([sample.reward for sample in rewarded if sample.reward is not None])
    for sample, value in zip(rewarded, values, strict=True):
        sample.advantage = float(value)


def drop_reason(group: Scored, run: RunConfig) -> str | None:
    """Why a scored group is not to be delivered, or None.

    The group policy first (`complete`: no sample may have failed; `min_viable`: at least so many
    rewarded ones), then the filters. An eval is never filtered, but for a run that was stopped and
    for samples that its topics' retention deleted.
    """
    if any(sample.stop is Stop.CANCELLED for sample in group.samples):
        return Stop.CANCELLED.value
    if any(sample.error is not None and sample.error.type == RETENTION for sample in group.samples):
        return RETENTION
    if run.pipeline == "eval":
        return None
    failed = [sample for sample in group.samples if not sample.stop.scored]
    rewarded = len(group.samples) - len(failed)
    if run.group_policy == "complete" and (failed or len(group.samples) < group.k):
        return failed[0].stop.value if failed else "incomplete"
    if run.group_policy == "min_viable" and rewarded < max(1, run.min_viable):
        return "below_min_viable"
    return _filtered(group, run)


def finish(group: Scored, run: RunConfig) -> None:
    """What the last scoring stage does to a group: advantages, then policy and filters."""
    set_advantages(group.samples, advantage_function(run.advantage))
    reason = drop_reason(group, run)
    if reason is not None:
        group.kind, group.reason = Kind.DROPPED, reason
        failed = next((s.error for s in group.samples if s.error is not None), None)
        group.detail = f"{failed.type}: {failed.message}" if failed else ""


def _filtered(group: Scored, run: RunConfig) -> str | None:
    filters = run.filters
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    zero_variance = filters.zero_variance == "on" or (
        filters.zero_variance == "auto" and run.pipeline == "rl" and not run.teacher.on
    )
    if zero_variance and group.k > 1 and len(rewards) == 1:
        return "zero_variance"
    longest = max(
        (len(q.tokens) for sample in group.samples for q in sample.sequences), default=0
    )
    if run.pipeline == "rl" and 0 < filters.max_sequence_tokens < longest:
        return "overlong"
    shortest = min((sample.usage.completion_tokens for sample in group.samples), default=0)
    if shortest < filters.min_completion_tokens:
        return "too_short"
    return None


