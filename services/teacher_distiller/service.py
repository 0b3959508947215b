"""The teacher-distiller as a service."""

from __future__ import annotations

import asyncio
from typing import Any

from rollstream.shared.config import ConfigError
from rollstream.shared.inference.client import InferenceClient, tokenizer_facts
from rollstream.shared.inference.types import InferenceError
from rollstream.shared.loop import run_stage
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, RunConfig, Status
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings
from rollstream.shared.step import Step

from .distill import Distil


class TeacherDistiller:
    """Serves runs whose teacher can give prompt logprobs."""

    name = "teacher-distiller"
    consumes = frozenset({"Scored", "Distilled"})
    produces = "Distilled"

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Ask the teacher once what it can do. Raises Refusal."""
        teacher = run.teacher
        if not teacher.endpoint:
            raise Refusal("teacher.endpoint", "(not given)", "give the teacher's URL or endpoint")
        if not teacher.model:
            raise Refusal("teacher.model", "(not given)", "give the name of the teacher's model")
        async with self._client(run) as client:
            try:
                # The wait says more than the timeout does, so it comes first.
                async with asyncio.timeout(self._settings.answer_wait_s * 1.2):
                    await client.wait_until_up(self._settings.answer_wait_s)
                    found = await client.capabilities(teacher.model)
                    facts = await tokenizer_facts(client, found, teacher.model)
            except (InferenceError, TimeoutError) as error:
                why = str(error) or "it takes requests and does not answer"
                raise Refusal(
                    "teacher.endpoint", teacher.endpoint, f"start the server ({why})"
                ) from error
        if found.models and teacher.model not in found.models:
            raise Refusal("teacher.model", teacher.model, f"it has: {', '.join(found.models)}")
        if not found.prompt_logprobs:
            why = found.detail.get("prompt_logprobs", "it returns none")
            raise Refusal(
                "teacher.endpoint", teacher.endpoint, f"needs prompt logprobs as vLLM has ({why})"
            )
        if teacher.top_k > found.max_prompt_logprobs:
            raise Refusal(
                "teacher.top_k", teacher.top_k,
                f"the server allows {found.max_prompt_logprobs} (vLLM: --max-logprobs)",
            )
        return {"server": found.server, **facts}

    def endpoints_asked(self) -> list[str]:
        """What `--check` looks at; which one is the teacher's, only a run tells."""
        return list(self._settings.endpoints)

    async def attend(self, context: RunContext) -> None:
        run = context.run
        async with self._client(run) as client:
            step = Step(
                each=Distil(
                    run, client, stopped=lambda: context.status is Status.STOPPED
                ), max_in_flight=self._settings.max_in_flight,
                deadline_s=run.deadlines.teacher_s, max_attempts=1,
            )
            await run_stage(context, step, self.produces)

    async def close(self) -> None:
        """Nothing outlives a run here."""

    def _client(self, run: RunConfig) -> InferenceClient:
        try:
            endpoint = self._settings.endpoint(run.teacher.endpoint)
            return InferenceClient(
                endpoint.urls, api_key=endpoint.api_key(),
                max_concurrent=self._settings.max_in_flight * 8,
                max_tokens_in_flight=self._settings.teacher_tokens_in_flight,
                request_timeout_s=run.deadlines.teacher_s,
            )
        except ConfigError as error:
            raise Refusal("teacher.endpoint", run.teacher.endpoint, error.fix) from error
        except ValueError as error:
            raise Refusal("teacher.endpoint", run.teacher.endpoint, str(error)) from error
