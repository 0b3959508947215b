"""The step: attach a teacher's view to each sequence of a group, aligned to its tokens.

`distill.token_ids[t]` are the teacher's k best, by rank, for token t given tokens[:t]; position 0
has none. Where any sequence of the group fails, the whole group goes on without payload, marked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from rollstream.shared.arrays import pack, unpack
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.refusals import Refusals, RefusesAll
from rollstream.shared.inference.types import InferenceError, PromptLogprobs, ServerUnavailable
from rollstream.shared.records import Distill, Distilled, Failure, Scored, Sequence, passed_on
from rollstream.shared.runs import RunConfig
from rollstream.shared.step import Blocked, PausesRun

SKIP = -1


class Distil:
    """The step of one run."""

    def __init__(
        self, run: RunConfig, client: InferenceClient, *, stopped: Callable[[], bool] = bool
    ) -> None:
        self._run = run
        self._client = client
        self._stopped = stopped
        self._refusals = Refusals()

    async def __call__(self, group: Scored) -> Distilled:
        """The group with its payload. Raises Blocked where every group would fail now."""
        k = top_k(group, self._run)
        distilled = passed_on(Distilled, group)
        distilled.teacher, distilled.top_k = self._run.teacher.model, k
        sequences = [q for sample in group.samples for q in sample.sequences]
        if k == SKIP or not sequences:
            return distilled
        if self._stopped():
            distilled.distill_error = Failure("cancelled", "the run was stopped")
            return distilled
        # waits: within the step's deadline
        answers = await asyncio.gather(
            *(self._ask(q, k, f"{group.run}/{group.n}") for q in sequences),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            distilled.distill_error = _failure(failures, self._run)
            return distilled
        for sequence, answer in zip(sequences, answers, strict=True):
            if isinstance(answer, Distill):
                sequence.distill = answer
        return distilled

    async def _ask(self, sequence: Sequence, k: int, sticky: str) -> Distill:
        ids = unpack(sequence.tokens).tolist()
        try:
            seen = await self._client.prompt_logprobs(
                ids, k, model=self._run.teacher.model, deadline_s=self._run.deadlines.teacher_s,
                sticky=sticky,
            )
        except InferenceError as error:
            raise self._refusals.judged(error) from error
        self._refusals.accepted()
        offsets = await self._client.text_offsets(
            ids, seen, model=self._run.teacher.model, deadline_s=self._run.deadlines.teacher_s
        )
        if offsets is not None:
            sequence.extra["text_offsets"] = pack(offsets, "int32")
        return payload(ids, seen, k)


def _failure(failures: list[BaseException], run: RunConfig) -> Failure:
    for error in failures:
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, RefusesAll):
            raise PausesRun(f"teacher {run.teacher.endpoint}: {error}")
        if isinstance(error, ServerUnavailable):
            raise Blocked(f"teacher {run.teacher.endpoint}: {error}")
    return Failure(type(failures[0]).__name__, str(failures[0]))


def top_k(group: Scored, run: RunConfig) -> int:
    """The group's own k, else the run's; -1 = skip."""
    if group.group_overrides.get("skip_teacher_top_k"):
        return SKIP
    return max(SKIP, int(group.group_overrides.get("teacher_top_k", run.teacher.top_k)))


def payload(token_ids: list[int], seen: PromptLogprobs, k: int) -> Distill:
    """A teacher's answer as packed arrays aligned to the tokens.

    Raises ValueError where its length, or the number of candidates at a position, is not ours.
    """
    length = len(token_ids)
    if not len(seen.top_ids) == len(seen.top_logprobs) == len(seen.own) == length:
        raise ValueError(f"the teacher speaks of {len(seen.own)} tokens, the sequence has {length}")
    ids = np.full((length, k), -1, np.int32)
    logprobs = np.zeros((length, k), np.float32)
    for t in range(1, length):
        if len(seen.top_ids[t]) != k or len(seen.top_logprobs[t]) != k:
            raise ValueError(f"the teacher gave {len(seen.top_ids[t])} candidates at {t}, not {k}")
        ids[t], logprobs[t] = seen.top_ids[t], seen.top_logprobs[t]
    own = [0.0 if value is None else value for value in seen.own]
    return Distill(
        k=k, token_ids=pack(ids, "int32"), logprobs=pack(logprobs, "float16"),
        own=pack(own, "float32"),
    )
