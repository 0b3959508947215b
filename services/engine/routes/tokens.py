"""/tokenize and /detokenize."""

from __future__ import annotations

from aiohttp import web

from rollstream.services.engine.answers import json_answer
from rollstream.services.engine.bodies import DetokenizeBody, TokenizeBody, read_body
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.serving import SERVING

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of chat messages."""
    serving = request.app[SERVING]
    body = await read_body(request, TokenizeBody)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    text = serving.render(body) if body.prompt is None else body.prompt
    tokens = serving.tokenizer.encode(text)
    names = [serving.tokenizer.token_name(token) for token in tokens]
    return json_answer(
        {
            "count": len(tokens),
            "max_model_len": serving.max_model_len,
            "tokens": tokens,
            "token_strs": names if body.return_token_strs else None,
        }
    )


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    serving = request.app[SERVING]
    body = await read_body(request, DetokenizeBody)
    serving.check_model(body.model)
    if body.tokens and (worst := max(body.tokens)) >= serving.tokenizer.size:
        raise ApiError(f"Token id {worst} is out of vocabulary", param="tokens")
    return json_answer({"prompt": serving.tokenizer.decode(body.tokens)})
