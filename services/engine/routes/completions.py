"""/v1/completions: raw prompts, and a teacher's view of them (`prompt_logprobs`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from aiohttp import web

from rollstream.services.engine.answers import (
    json_answer,
    prompt_logprobs_of,
    ranked,
    token_label,
    usage,
)
from rollstream.services.engine.bodies import CompletionBody, read_body, sampling_from
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.sequences import Sampling, Sequence, TokenChoice
from rollstream.services.engine.serving import SERVING, Serving, request_id_of
from rollstream.services.engine.streaming import Stream

Choices = Iterable[TokenChoice | int]

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """n choices for each prompt, in order."""
    serving = request.app[SERVING]
    body = await read_body(request, CompletionBody)
    serving.check_model(body.model)
    prompts = _prompts(serving, body)
    samplings = [_sampling(serving, body, prompt) for prompt in prompts]
    request_id = request_id_of(request, body.request_id)
    answer = _Answer(serving, body, f"cmpl-{request_id}")
    if body.stream:
        return await answer.stream(request, prompts, samplings)
    sequences = await serving.finished(
        prompts, samplings, n=body.n or 1, request_id=answer.id, priority=body.priority
    )
    return json_answer(answer.whole(sequences), {"X-Request-Id": request_id})


def _prompts(serving: Serving, body: CompletionBody) -> list[list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [serving.tokenizer.encode(given)]
    if not given:
        raise ApiError("prompt: the list is empty", param="prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    if ids:
        raise ApiError("prompt: the list mixes token ids and whole prompts", param="prompt")
    return [
        serving.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in given
        if not isinstance(prompt, int)
    ]


def _sampling(serving: Serving, body: CompletionBody, prompt: list[int]) -> Sampling:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens: must be at least 1 without echo", param="max_tokens")
    if body.stream and (body.echo or body.prompt_logprobs is not None):
        name = "echo" if body.echo else "prompt_logprobs"
        raise ApiError(f"{name} can't be streamed", param=name)
    sampling = sampling_from(
        body,
        max_tokens=serving.max_tokens(prompt, body.max_tokens, param="prompt"),
        logprobs=body.logprobs,
        max_logprobs=serving.max_logprobs,
    )
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        return replace(sampling, prompt_logprobs=body.logprobs)
    return sampling


class _Answer:
    """One completion request's answer, in either form."""

    def __init__(self, serving: Serving, body: CompletionBody, id: str) -> None:
        self.id = id
        self._serving = serving
        self._body = body

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        n = self._body.n or 1
        choices = [
            self._choice(sequence, sequences[i - i % n]) for i, sequence in enumerate(sequences)
        ]
        return self._head() | {"choices": choices, "usage": usage(sequences)}

    async def stream(
        self, request: web.Request, prompts: list[list[int]], samplings: list[Sampling]
    ) -> web.StreamResponse:
        body, serving = self._body, self._serving
        async with serving.ticket(
            prompts, samplings, n=body.n or 1, request_id=self.id,
            priority=body.priority, every_token=True,
        ) as ticket:
            stream = Stream(request, ticket, serving.tokenizer)
            await stream.open()
            async for delta in stream.deltas():
                sequence = delta.sequence
                choice = {
                    "index": sequence.index,
                    "text": delta.text,
                    "logprobs": self._logprobs(delta.choices),
                    "finish_reason": sequence.finish_reason if delta.last else None,
                    "stop_reason": sequence.stop_reason if delta.last else None,
                }
                if body.return_token_ids:
                    choice["token_ids"] = [c.token for c in delta.choices]
                    if len(sequence.output) == len(delta.choices):
                        choice["prompt_token_ids"] = sequence.prompt
                await stream.send(self._head() | {"choices": [choice]})
            if body.stream_options and body.stream_options.include_usage:
                await stream.send(self._head() | {"choices": [], "usage": usage(ticket.sequences)})
            return await stream.close()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": int(time.time()),
            "model": self._serving.model,
        }

    def _choice(self, sequence: Sequence, first: Sequence) -> dict[str, Any]:
        """`first` is the prompt's first choice: it has the prompt's scores."""
        body, tokenizer = self._body, self._serving.tokenizer
        echoed = tokenizer.decode(sequence.prompt) if body.echo else ""
        given = _given(first) if body.echo and body.logprobs is not None else []
        wanted = body.prompt_logprobs is not None
        return {
            "index": sequence.index,
            "text": echoed + sequence.text,
            "logprobs": self._logprobs([*given, *sequence.choices]),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output if body.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs_of(tokenizer, first) if wanted else None,
            "prompt_token_ids": sequence.prompt if body.return_token_ids else None,
        }

    def _logprobs(self, choices: Choices) -> dict[str, Any] | None:
        """OpenAI's four aligned lists; a bare token id has no logprob (a prompt's first)."""
        k = self._body.logprobs
        if k is None:
            return None
        tokenizer, as_ids = self._serving.tokenizer, bool(self._body.return_tokens_as_token_ids)
        lists: dict[str, list[Any]] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [],
        }
        offset = 0
        for choice in choices:
            token = choice if isinstance(choice, int) else choice.token
            lists["text_offset"].append(offset)
            lists["tokens"].append(token_label(tokenizer, token, as_ids))
            offset += len(tokenizer.token_text(token))
            if isinstance(choice, int):
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                continue
            best = ranked(choice, k)
            lists["token_logprobs"].append(best[0][1])
            lists["top_logprobs"].append(
                {token_label(tokenizer, i, as_ids): p for i, p in best}
            )
        return lists


def _given(sequence: Sequence) -> list[TokenChoice | int]:
    """The prompt's tokens as if they had been chosen."""
    if (scores := sequence.prompt_scores) is None:
        return list(sequence.prompt)
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    rows = zip(sequence.prompt, scores.own.tolist(), scores.rank.tolist(), tops, strict=True)
    chosen: list[TokenChoice | int] = [
        TokenChoice(token, own, rank, list(zip(*top, strict=True)))
        for token, own, rank, top in rows
    ]
    chosen[0] = sequence.prompt[0]
    return chosen
