"""The step: the k rollouts of a group become one Scored, or a reason to drop it.

A failure is never a reward of 0: what could not be scored raises, is tried again, and is parked
with its original bytes in the end.
"""

from __future__ import annotations

from rollstream.shared.environments.scoring import SampleScore
from rollstream.shared.environments.workers import FingerprintMismatch, ScoringPool
from rollstream.shared.records import Failure, Sample, Scored
from rollstream.shared.rewards import finish
from rollstream.shared.runs import RunConfig
from rollstream.shared.step import Blocked


class Unscorable(Exception):
    """A reward function failed on this group."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.type}: {failure.message}")


class Score:
    """The step of one run; `final` where no other scoring stage follows."""

    def __init__(self, run: RunConfig, pool: ScoringPool, *, final: bool) -> None:
        self._run = run
        self._pool = pool
        self._final = final

    async def __call__(self, group: Scored) -> Scored:
        """Score a group: just assembled, put back, or scored before. Raises Unscorable, Blocked."""
        if group.env.id and any(sample.stop.scored for sample in group.samples):
            try:
                scores = await self._pool.score(
                    group.env, group.row, group.samples, self._run.deadlines.scoring_s
                )
            except FingerprintMismatch as error:
                raise Blocked(str(error)) from error
            for sample, score in zip(group.samples, scores, strict=True):
                _apply(sample, score)
        if self._final:
            finish(group, self._run)
        return group


def _apply(sample: Sample, score: SampleScore) -> None:
    if score.failure is not None and sample.stop.scored:
        raise Unscorable(score.failure)
    sample.reward = score.reward
    sample.rewards = score.rewards
    sample.metrics = score.metrics
    sample.parsed_answer = score.parsed_answer
