"""A sixth service, in a package of its own: Scored -> Scored, shorter answers are worth more.

    pip install ./examples/length_reward
    rollstream run length-reward --brokers ...
"""

from __future__ import annotations

from typing import Any

from rollstream.shared.loop import run_stage
from rollstream.shared.records import RewardPart, Scored
from rollstream.shared.rewards import finish, total
from rollstream.shared.routes import Route
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings
from rollstream.shared.step import Step

PENALTY_PER_TOKEN = -0.01


class LengthReward:
    """Adds the reward part `length` to each sample that has a reward."""

    name = "length-reward"
    consumes = frozenset({"Scored"})
    produces = "Scored"

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """It can serve every run."""
        return {}

    async def attend(self, context: RunContext) -> None:
        """Work until the run ends."""

        async def reward(groups: list[Scored]) -> list[Scored]:
            return [rewarded(group, context.run) for group in groups]

        await run_stage(context, Step(batch=reward), self.produces)

    async def close(self) -> None:
        """Nothing to close."""


def rewarded(group: Scored, run: RunConfig) -> Scored:
    """The group with the part added, totals, advantages and filters done again."""
    for sample in group.samples:
        if sample.reward is not None:
            tokens = float(sample.usage.completion_tokens)
            sample.rewards = [*sample.rewards, RewardPart("length", tokens, PENALTY_PER_TOKEN)]
            sample.reward = total(sample.rewards)
    finish(group, run)
    return group
