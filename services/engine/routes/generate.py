"""/inference/v1/generate: tokens in, tokens out, with the versions that sampled them."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from rollstream.services.engine.answers import (
    generate_logprobs,
    json_answer,
    prompt_logprobs_of,
    usage,
)
from rollstream.services.engine.bodies import GenerateBody, read_body, sampling_from
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.sequences import Sequence
from rollstream.services.engine.serving import SERVING, request_id_of

routes = web.RouteTableDef()


@routes.post("/inference/v1/generate")
async def generate(request: web.Request) -> web.Response:
    """n choices for one prompt of token ids."""
    serving = request.app[SERVING]
    body = await read_body(request, GenerateBody)
    serving.check_model(body.model)
    if body.stream:
        raise ApiError("stream is not supported on this route by this engine", param="stream")
    if body.output_mode not in (None, "tokens"):
        raise ApiError(f"output_mode={body.output_mode!r}: only 'tokens'", param="output_mode")
    fields = body.sampling_params
    sampling = sampling_from(
        fields,
        max_tokens=serving.max_tokens(body.token_ids, fields.max_tokens, param="token_ids"),
        logprobs=fields.logprobs,
        max_logprobs=serving.max_logprobs,
    )
    request_id = request_id_of(request, body.request_id)
    sequences = await serving.finished(
        [body.token_ids], [sampling], n=fields.n or 1,
        request_id=f"generate-tokens-{request_id}", priority=body.priority,
    )
    first = sequences[0]
    wanted = fields.prompt_logprobs is not None
    answer = {
        "request_id": first.request_id,
        "model": serving.model,
        "created": int(time.time()),
        "usage": usage(sequences),
        "prompt_logprobs": prompt_logprobs_of(serving.tokenizer, first) if wanted else None,
        "prompt_token_ids": None,
        "output_mode": "tokens",
        "choices": [_choice(sequence, fields.logprobs) for sequence in sequences],
    }
    return json_answer(answer, {"X-Request-Id": request_id})


def _choice(sequence: Sequence, logprobs: int | None) -> dict[str, Any]:
    return {
        "index": sequence.index,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.output,
        "weight_versions": [span._asdict() for span in sequence.spans],
        "logprobs": None if logprobs is None else generate_logprobs(sequence.choices, logprobs),
    }
