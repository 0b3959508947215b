"""The generator as a service: which runs it can serve, and attending one."""

from __future__ import annotations

import asyncio
from typing import Any

from rollstream.shared.config import ConfigError
from rollstream.shared.environments import v0
from rollstream.shared.environments.library import Library
from rollstream.shared.inference.client import InferenceClient, tokenizer_facts
from rollstream.shared.inference.refusals import AT_ONCE
from rollstream.shared.inference.types import InferenceError
from rollstream.shared.loop import run_stage
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, RunConfig, Status
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings
from rollstream.shared.step import Blocked, PausesRun, Step

from .generate import Generate
from .updates import kept_current


class Generator:
    """Serves runs whose model its endpoints have."""

    name = "generator"
    consumes = frozenset({"Prompt"})
    produces = "Rollout"

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._library = Library()

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Ask the server once what it can do. Raises Refusal."""
        fingerprints = {e.ref.id: e.ref.fingerprint for e in await self._environments(run)}
        async with self._client(run) as client:
            try:
                # The wait says more than the timeout does, so it comes first.
                async with asyncio.timeout(self._settings.answer_wait_s * 1.2):
                    await client.wait_until_up(self._settings.answer_wait_s)
                    found = await client.capabilities(run.model or None)
                    facts: dict[str, Any] = {}
                    if run.teacher.on:
                        facts = await tokenizer_facts(client, found, run.model)
            except (InferenceError, TimeoutError) as error:
                why = str(error) or "it takes requests and does not answer"
                raise Refusal("endpoint", run.endpoint, f"start the server ({why})") from error
        if found.models and run.model not in found.models:
            raise Refusal("model", run.model, f"the server has: {', '.join(found.models)}")
        if run.wants_tokens and not (found.token_ids and found.logprobs):
            missing = "token ids" if not found.token_ids else "logprobs of sampled tokens"
            why = found.detail.get("token_ids") or found.detail.get("logprobs") or ""
            raise Refusal(
                "endpoint", run.endpoint,
                f"rl needs {missing}, which this server does not return: use vLLM ({why})",
            )
        if run.updates.method in ("trainer", "reload") and not found.weight_version:
            raise Refusal(
                "updates.method", run.updates.method,
                f"{run.endpoint} does not tell its weights' version: start vLLM with "
                f"VLLM_SERVER_DEV_MODE=1 ({found.detail.get('weight_version', '')})",
            )
        if run.wants_tokens and found.logprobs_mode == "raw" and not run.sampling.is_plain:
            raise Refusal(
                "endpoint", run.endpoint,
                "its logprobs are the model's, not the sampler's: start vLLM with --logprobs-mode "
                "processed_logprobs, or sample with temperature 1, top_p 1 and without top_k",
            )
        return {"fingerprints": fingerprints, "server": found.server, **facts}

    def endpoints_asked(self) -> list[str]:
        """What `--check` looks at."""
        return list(self._settings.endpoints) or ["default"]

    async def attend(self, context: RunContext) -> None:
        run = context.run
        loaded = await self._environments(run)
        async with self._client(run) as client:
            # A run that is stopped asks for nothing any more, also where its server refuses it.
            stopped = context.status is Status.STOPPED
            generate = Generate(
                run, client, {e.ref.fingerprint: e for e in loaded},
                want_tokens=run.wants_tokens or stopped or await _gives_tokens(client, run),
            )
            step = Step(
                each=generate,
                max_in_flight=self._settings.max_in_flight,
                deadline_s=run.deadlines.sample_s, max_attempts=1,
            )

            async def work() -> None:
                await run_stage(context, step, self.produces)

            if run.updates.method == "none":
                await work()
            else:
                await kept_current(context, client, generate, work)

    async def close(self) -> None:
        """Nothing outlives a run here."""

    def _client(self, run: RunConfig) -> InferenceClient:
        try:
            endpoint = self._settings.endpoint(run.endpoint)
            return InferenceClient(
                endpoint.urls, api_key=endpoint.api_key(),
                max_concurrent=self._settings.max_in_flight,
                max_tokens_in_flight=self._settings.tokens_in_flight,
                request_timeout_s=run.deadlines.request_s,
            )
        except ConfigError as error:
            raise Refusal("endpoint", run.endpoint, error.fix) from error
        except ValueError as error:
            raise Refusal("endpoint", run.endpoint, str(error)) from error

    async def _environments(self, run: RunConfig) -> list[v0.Environment]:
        """The run's environments, each loaded once in this process. Raises Refusal."""
        found = []
        for source in run.environments:
            if not source.id:
                continue
            try:
                found.append(await asyncio.to_thread(self._library.get, source.id, source.args))
            except v0.EnvironmentUnusable as error:
                raise Refusal("env", source.id, error.reason) from error
        return found


async def _gives_tokens(client: InferenceClient, run: RunConfig) -> bool:
    """Whether a run that can do without token ids gets them all the same. Raises Blocked."""
    try:
        found = await client.capabilities(run.model)
    except InferenceError as error:
        kind = PausesRun if error.status in AT_ONCE else Blocked
        raise kind(f"endpoint {run.endpoint}: {error}") from error
    return found.token_ids and found.logprobs
