"""Scoring a whole group with the environment's own rubric.

Where nothing fails, rewards and metrics equal what verifiers gives in-process on the same states.
Where something fails, the reward is withheld and the failure is data: never a 0.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from rollstream.shared.environments.strict import Failed, recording
from rollstream.shared.environments.wire import load_state
from rollstream.shared.records import Failure, RewardPart, Row, Sample

if TYPE_CHECKING:
    from verifiers.legacy.types import State

    from rollstream.shared.environments.v0 import Environment, Finished

log = logging.getLogger(__name__)


class SampleScore(msgspec.Struct, kw_only=True):
    """What scoring found out about one sample."""

    reward: float | None = None
    """verifiers' weighted sum; None where the sample may not be scored or scoring it failed."""
    rewards: list[RewardPart] = []
    """Every function's own value and weight, in the rubric's order; failed ones are absent."""
    metrics: dict[str, float] = {}
    """By name, as verifiers sums them over rubrics; a failed function's metric is absent."""
    parsed_answer: str | None = None
    failure: Failure | None = None
    """Why *scoring* failed. A sample that ended in an error keeps its own and has none here."""


async def score_group(env: Environment, row: Row, samples: list[Sample]) -> list[SampleScore]:
    """One score per sample, in order.

    Only samples whose `stop.scored` holds meet the rubric: group functions rank those among
    themselves, the others get reward None.
    """
    scored = [n for n, sample in enumerate(samples) if sample.stop.scored]
    try:
        states = [
            load_state(samples[n].state, row, samples[n].completion, samples[n].sequences)
            for n in scored
        ]
        found = await score_states(env, row, states)
    except Exception as error:
        # One unreadable state is the whole group's failure: its siblings' ranks would be wrong.
        failure = Failure("state_unreadable", f"{type(error).__name__}: {error}")
        found = [SampleScore(failure=failure) for _ in scored]
    return _spread(len(samples), scored, found)


async def score_finished(
    env: Environment, row: Row, finished: list[Finished]
) -> list[SampleScore]:
    """The same on live rollouts, in the process that ran them (fused): nothing crosses a wire."""
    scored = [n for n, one in enumerate(finished) if one.stop.scored]
    states = [state for n in scored if (state := finished[n].live) is not None]
    return _spread(len(finished), scored, await score_states(env, row, states))


def _spread(count: int, scored: list[int], found: list[SampleScore]) -> list[SampleScore]:
    """The scores at their samples' places, an empty one at every other place."""
    scores = [SampleScore() for _ in range(count)]
    for n, score in zip(scored, found, strict=True):
        scores[n] = score
    return scores


async def score_states(env: Environment, row: Row, states: list[State]) -> list[SampleScore]:
    """Score states together through `rubric.score_group`, then run the rubric's cleanup."""
    if not states:
        return []
    with recording(states) as record:
        try:
            await env.raw.rubric.score_group(states)
        except Exception as error:
            failure = Failure("scoring_raised", f"{type(error).__name__}: {error}")
            return [
                SampleScore(failure=(_decisive(record.failed[id(state)]) or failure))
                for state in states
            ]
        finally:
            await _clean_up(env, states)
    return [
        _score(
            state, record.parts[id(state)], record.failed[id(state)],
            parsed_answer=env.parse_answer(row, state),
        )
        for state in states
    ]


def _score(
    state: State, parts: list[RewardPart], failed: list[Failed], *, parsed_answer: str | None
) -> SampleScore:
    lost = {one.source for one in failed}
    metrics = {
        name: float(value)
        for name, value in (state["metrics"] or {}).items()
        if name not in lost and math.isfinite(value)
    }
    score = SampleScore(rewards=parts, metrics=metrics, parsed_answer=parsed_answer)
    if failure := _decisive(failed):
        score.failure = failure
        return score
    reward = float(state["reward"])
    rest = reward - sum(part.value * part.weight for part in parts)
    if not math.isfinite(reward):
        score.failure = Failure("reward_not_finite", f"the rubric's total is {reward}")
        return score
    if not math.isclose(rest, 0.0, abs_tol=1e-9 * max(1.0, abs(reward))):
        # A rubric with a scoring loop of its own: the parts must still sum up to its total.
        score.rewards = [*parts, RewardPart("rubric", rest, 1.0)]
    score.reward = reward
    return score


def _decisive(failed: list[Failed]) -> Failure | None:
    """The first failure that a reward depends on: a zero-weight metric only loses itself."""
    return next((one.failure for one in failed if one.weight != 0), None)


async def _clean_up(env: Environment, states: list[State]) -> None:
    for state in states:
        try:
            await env.raw.rubric.cleanup(state)
        except Exception as error:
            log.warning("cleanup of %s's rubric failed: %s", env.ref.id, error)
