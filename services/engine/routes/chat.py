"""/v1/chat/completions and its render."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from rollstream.services.engine.answers import (
    chat_logprobs,
    json_answer,
    prompt_logprobs_of,
    usage,
)
from rollstream.services.engine.bodies import ChatBody, read_body, sampling_from
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.sequences import Sampling, Sequence
from rollstream.services.engine.serving import SERVING, Serving, request_id_of
from rollstream.services.engine.streaming import Delta, Stream

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat(request: web.Request) -> web.StreamResponse:
    """Answers with n choices, whole or as a stream."""
    serving = request.app[SERVING]
    body = await read_body(request, ChatBody)
    prompt, sampling = _prepare(serving, body)
    request_id = request_id_of(request, body.request_id)
    answer = _Answer(serving, body, prompt, f"chatcmpl-{request_id}")
    if body.stream:
        return await answer.stream(request, sampling)
    sequences = await serving.finished(
        [prompt], [sampling], n=body.n or 1, request_id=answer.id, priority=body.priority
    )
    return json_answer(answer.whole(sequences), {"X-Request-Id": request_id})


@routes.post("/v1/chat/completions/render")
async def render(request: web.Request) -> web.Response:
    """The same request as /inference/v1/generate would take it."""
    serving = request.app[SERVING]
    body = await read_body(request, ChatBody)
    prompt, sampling = _prepare(serving, body)
    return json_answer(
        {
            "request_id": f"chatcmpl-{request_id_of(request, body.request_id)}",
            "model": serving.model,
            "token_ids": prompt,
            "priority": body.priority,
            "sampling_params": {
                "n": body.n or 1,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "skip_special_tokens": sampling.skip_special_tokens,
                "logprobs": sampling.logprobs,
                "prompt_logprobs": sampling.prompt_logprobs,
            },
        }
    )


def _prepare(serving: Serving, body: ChatBody) -> tuple[list[int], Sampling]:
    serving.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs can't be streamed", param="prompt_logprobs")
    prompt = serving.tokenizer.encode(serving.render(body))
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_from(
        body,
        max_tokens=serving.max_tokens(prompt, wanted),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_logprobs=serving.max_logprobs,
    )
    return prompt, sampling


class _Answer:
    """One chat request's answer, in either form."""

    def __init__(self, serving: Serving, body: ChatBody, prompt: list[int], id: str) -> None:
        self.id = id
        self._serving = serving
        self._body = body
        self._prompt = prompt

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        wanted = self._body.prompt_logprobs is not None
        tokenizer = self._serving.tokenizer
        return self._head("chat.completion") | {
            "choices": [self._choice(sequence) for sequence in sequences],
            "usage": usage(sequences),
            "prompt_logprobs": prompt_logprobs_of(tokenizer, sequences[0]) if wanted else None,
            "prompt_token_ids": self._prompt if self._body.return_token_ids else None,
        }

    async def stream(self, request: web.Request, sampling: Sampling) -> web.StreamResponse:
        body, serving = self._body, self._serving
        async with serving.ticket(
            [self._prompt], [sampling], n=body.n or 1, request_id=self.id,
            priority=body.priority, every_token=True,
        ) as ticket:
            stream = Stream(request, ticket, serving.tokenizer)
            await stream.open()
            for sequence in ticket.sequences:
                first = self._chunk(sequence.index, {"role": "assistant", "content": ""})
                if body.return_token_ids:
                    first["prompt_token_ids"] = self._prompt
                await stream.send(first)
            async for delta in stream.deltas():
                await stream.send(self._delta(delta))
            if body.stream_options and body.stream_options.include_usage:
                counts = {"choices": [], "usage": usage(ticket.sequences)}
                await stream.send(self._head("chat.completion.chunk") | counts)
            return await stream.close()

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": int(time.time()),
            "model": self._serving.model,
        }

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.text, "tool_calls": []},
            "logprobs": self._logprobs(sequence.choices),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output if self._body.return_token_ids else None,
        }

    def _delta(self, delta: Delta) -> dict[str, Any]:
        chunk = self._chunk(delta.sequence.index, {"content": delta.text})
        choice = chunk["choices"][0]
        choice["logprobs"] = self._logprobs(delta.choices)
        if self._body.return_token_ids:
            choice["token_ids"] = [c.token for c in delta.choices]
        if delta.last:
            choice["finish_reason"] = delta.sequence.finish_reason
            choice["stop_reason"] = delta.sequence.stop_reason
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, choices: list[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            self._serving.tokenizer, choices, self._body.top_logprobs or 0,
            bool(self._body.return_tokens_as_token_ids),
        )
