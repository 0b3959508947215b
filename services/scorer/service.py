"""The scorer as a service."""

from __future__ import annotations

from typing import Any

from rollstream.shared.config import ConfigError
from rollstream.shared.environments.v0 import EnvironmentUnusable
from rollstream.shared.environments.workers import ScoringPool, ScoringTimeout, WorkerDied
from rollstream.shared.loop import run_stage
from rollstream.shared.records import EnvRef
from rollstream.shared.rewards import advantage_function
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, RunConfig
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings
from rollstream.shared.step import Step

from .score import Score


class Scorer:
    """Scores groups in a pool of worker processes that all its runs share."""

    name = "scorer"
    consumes = frozenset({"Rollout", "Scored"})
    produces = "Scored"

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._pool: ScoringPool | None = None

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Load the run's environments in a worker. Raises Refusal."""
        try:
            advantage_function(run.advantage)
        except ConfigError as error:
            raise Refusal("advantage", run.advantage, error.fix) from error
        return {"fingerprints": await self._load(run)}

    async def attend(self, context: RunContext) -> None:
        run, route = context.run, context.route
        # Before it takes a share: what a cold member is given waits until it is warm.
        await self._load(run)
        upstream = next(s for s in run.stages if s.output == route.input)
        score = Score(run, self._workers(), final=not _scored_again(run, route))
        limits = {
            "max_in_flight": self._settings.max_in_flight, "max_attempts": run.max_attempts,
            # A worker's own deadline kills it; this one also covers the wait for a free worker.
            "deadline_s": run.deadlines.scoring_s * (2 + self._settings.max_in_flight),
        }
        if upstream.service == "generator":
            step = Step(
                group=score, max_open_bytes=self._settings.open_groups_bytes, **limits
            )
        else:
            step = Step(each=score, **limits)
        await run_stage(context, step, self.produces)

    async def _load(self, run: RunConfig) -> dict[str, str]:
        """The fingerprints of the run's environments, each loaded in a worker. Raises Refusal."""
        fingerprints = {}
        try:
            for source in run.environments:
                if source.id:
                    ref = EnvRef(source.id, source.args)
                    fingerprints[source.id] = await self._workers().check(ref)
        except EnvironmentUnusable as error:
            raise Refusal("env", error.env, error.reason) from error
        except (ScoringTimeout, WorkerDied) as error:
            raise Refusal("env", run.environments[0].id, str(error)) from error
        return fingerprints

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    def _workers(self) -> ScoringPool:
        if self._pool is None:
            self._pool = ScoringPool(self._settings.workers)
        return self._pool


def _scored_again(run: RunConfig, route: Route) -> bool:
    """Whether another scoring stage reads this one's output: it fills in the advantages then."""
    readers = [s.service for s in run.stages if s.input == route.output]
    return any(service not in ("teacher-distiller", "sink") for service in readers)
