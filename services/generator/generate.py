"""The step: one Prompt becomes exactly one Rollout, whatever the server does."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollstream.shared.environments.sequences import Turn, build, turn_of
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.refusals import Refusals, RefusesAll
from rollstream.shared.inference.types import (
    Completion,
    ContextOverflow,
    InferenceError,
    ServerUnavailable,
)
from rollstream.shared.records import (
    Failure,
    Message,
    Prompt,
    Rollout,
    Sequence,
    Stop,
    Usage,
    VersionSpan,
)
from rollstream.shared.runs import RunConfig
from rollstream.shared.step import Blocked, PausesRun

FINISH: dict[str, Stop] = {
    "stop": Stop.STOP,
    "length": Stop.LENGTH,
    "tool_calls": Stop.TOOL,
    "abort": Stop.CANCELLED,
    "content_filter": Stop.REFUSED,
}


class Generate:
    """The step of one run."""

    def __init__(
        self, run: RunConfig, client: InferenceClient, environments: dict[str, Any],
        *, want_tokens: bool,
    ) -> None:
        self._run = run
        self._want_tokens = want_tokens
        self._client = client
        self._environments = environments
        self._refusals = Refusals()
        self._sampling = sampling_arguments(run)
        self.model: Callable[[], str] = lambda: run.model
        """What the server is asked for: an adapter's name where the policy is one."""

    async def __call__(self, prompt: Prompt) -> Rollout:
        """Roll one sample out. Raises Blocked where no sample of the run would fare better now."""
        started_s = time.monotonic()
        environment = self._environments.get(prompt.env.fingerprint)
        if prompt.env.id and environment is None:
            raise Blocked(
                f"the prompt's environment {prompt.env.id} has fingerprint "
                f"{prompt.env.fingerprint[:12]}, here it is "
                f"{', '.join(f[:12] for f in self._environments)}: install the same version"
            )
        try:
            if environment is None:
                rollout = await self._plain(prompt)
            else:
                rollout = await self._environment(prompt, environment)
        except RefusesAll as error:
            raise PausesRun(f"endpoint {self._run.endpoint}: {error}") from error
        except ServerUnavailable as error:
            raise Blocked(f"endpoint {self._run.endpoint}: {error}") from error
        except ContextOverflow:
            rollout = self._rollout(prompt, stop=Stop.TOO_LONG)
        except InferenceError as error:
            rollout = self._rollout(
                prompt, stop=Stop.ERROR, error=Failure(type(error).__name__, str(error))
            )
        stamp(rollout.sequences, prompt.issued_version)
        rollout.duration_s = round(time.monotonic() - started_s, 4)
        return rollout

    async def _environment(self, prompt: Prompt, environment: Any) -> Rollout:
        """The environment's own loop, with our client in it."""
        done = await environment.rollout(
            prompt.row, self._chat(prompt), self._run.model, dict(self._sampling)
        )
        return self._rollout(
            prompt, completion=done.completion, sequences=done.sequences, stop=done.stop,
            finish_reason=done.finish_reason, error=done.error, state=done.state,
            usage=done.usage, endpoint=done.endpoint, attempts=done.attempts,
        )

    async def _plain(self, prompt: Prompt) -> Rollout:
        """A row without an environment: one turn."""
        done = await self._chat(prompt)(
            prompt.row.prompt, tools=None, sampling=dict(self._sampling), prior=None
        )
        turn: Turn = turn_of(done)
        return self._rollout(
            prompt, completion=[done.message], sequences=build([turn]),
            stop=FINISH.get(done.finish_reason, Stop.STOP), finish_reason=done.finish_reason,
            usage=done.usage, endpoint=done.endpoint, attempts=done.attempts,
        )

    def _chat(self, prompt: Prompt) -> Callable[..., Awaitable[Completion]]:
        run, client = self._run, self._client
        turns = 0

        async def chat(
            messages: list[Message], *, tools: list[dict[str, Any]] | None,
            sampling: dict[str, Any], prior: Completion | None,
        ) -> Completion:
            nonlocal turns
            turns += 1
            # Greedy decoding needs no seed, and some servers refuse one.
            seed = (prompt.seed + turns - 1) % 2**31 if sampling.get("temperature") else None
            try:
                done = await client.chat(
                    messages, model=self.model(), sampling=sampling, tools=tools, prior=prior,
                    seed=seed, sticky=f"{prompt.run}/{prompt.n}",
                    deadline_s=run.deadlines.request_s, want_tokens=self._want_tokens,
                    max_attempts=run.max_attempts,
                )
            except InferenceError as error:
                raise self._refusals.judged(error) from error
            self._refusals.accepted()
            return done

        return chat

    def _rollout(
        self, prompt: Prompt, *, stop: Stop, completion: list[Message] | None = None,
        sequences: list[Sequence] | None = None, finish_reason: str = "",
        error: Failure | None = None, state: dict[str, Any] | None = None,
        usage: Usage | None = None, endpoint: str = "", attempts: int = 1,
    ) -> Rollout:
        return Rollout(
            run=prompt.run, pipeline=prompt.pipeline, n=prompt.n, i=prompt.i, k=prompt.k,
            epoch=prompt.epoch, row_index=prompt.row_index, env=prompt.env, row=prompt.row,
            group_overrides=prompt.group_overrides, completion=completion or [],
            sequences=sequences or [], stop=stop, finish_reason=finish_reason, error=error,
            state=state or {}, usage=usage or Usage(),
            generation_params=dict(self._sampling) | {"seed": prompt.seed},
            model=self._run.model, endpoint=endpoint, attempts=attempts,
        )


def sampling_arguments(run: RunConfig) -> dict[str, Any]:
    """What the server is told; what is off is left out, for servers that don't know the name."""
    sampling = run.sampling
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens,
    }
    if sampling.top_p < 1:
        arguments["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        arguments["top_k"] = sampling.top_k
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
    return arguments


def stamp(sequences: list[Sequence], issued_version: int) -> None:
    """Give each sequence its policy version where the server named none.

    A server whose weights nobody numbered says nothing, or 0: then the version at admission holds,
    the oldest that it can be.
    """
    for sequence in sequences:
        if not any(span.version for span in sequence.versions):
            sequence.versions = [VersionSpan(issued_version, 0, len(sequence.tokens))]
