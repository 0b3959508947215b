"""A server in vLLM's dialect that can be made to fail, and questions to a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.types import Completion

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
START, END, SEVEN = 1, 2, 3  # SEVEN is one sampled token that reads "seven"
QUESTION = [{"role": "user", "content": "3 + 4?"}]
SAMPLING = {"max_tokens": 8, "temperature": 1.0}


def ids_of(messages: list[dict[str, Any]]) -> list[int]:
    """The fake's template and tokenizer: a token a character, special tokens around a message."""
    ids: list[int] = []
    for message in messages:
        text = f"{message['role']}\n{message['content']}"
        ids += [START, *map(ord, text), END, ord("\n")]
    return [*ids, START, *map(ord, "assistant\n")]


def refusal(status: int, message: str, **fields: Any) -> web.Response:
    error = {"message": message, "type": "x", "param": None, "code": status} | fields
    return web.json_response({"error": error}, status=status)


class Fake:
    """A server in vLLM's dialect that always says "seven", after its `faults` in turn."""

    def __init__(self, *, without: tuple[str, ...] = (), context: int = 400) -> None:
        self.without, self.context = without, context
        self.faults: list[Handler] = []
        self.always: Handler | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.connections: set[Any] = set()
        self.sampled = [SEVEN, END]
        self.finish = "stop"
        self.edit: Callable[[dict[str, Any]], Any] = lambda answer: None
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)

    async def __aenter__(self) -> Self:
        await self.server.start_server()
        self.url = str(self.server.make_url("/v1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.seen if at == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.seen.append((request.path, body))
        self.keys.add(request.headers.get("Authorization"))
        self.connections.add(request.transport)
        if self.faults:
            return await self.faults.pop(0)(request)
        if self.always:
            return await self.always(request)
        if request.path in self.without:
            return refusal(404, "Not Found")
        if body.get("model", "m") != "m":
            return refusal(404, f"The model `{body['model']}` does not exist.")
        answer = getattr(self, request.path.strip("/").replace("/", "_"))(body)
        if isinstance(answer, web.Response):
            return answer
        self.edit(answer)
        return web.json_response(answer)

    def v1_models(self, _: Any) -> Any:
        return {"data": [{"id": "m", "owned_by": "vllm"}]}

    def version(self, _: Any) -> Any:
        return {"version": "0.32.0"}

    def tokenize(self, body: Any) -> Any:
        if "prompt" in body:
            return {"tokens": [*map(ord, body["prompt"])]}
        return {"tokens": ids_of(body["messages"]), "max_model_len": self.context}

    def detokenize(self, body: Any) -> Any:
        return {"prompt": "".join(map(self.text_of, body["tokens"]))}

    @staticmethod
    def text_of(token: int) -> str:
        return "seven" if token == SEVEN else chr(token)

    def v1_chat_completions(self, body: Any) -> Any:
        prompt = ids_of(body["messages"])
        if len(prompt) + body.get("max_tokens", 1) > self.context:
            words = f"This model's maximum context length is {self.context} tokens."
            return refusal(400, words)
        message = {"role": "assistant", "content": "seven"}
        best = -0.5 * body.get("temperature", 1.0)
        choice = self._choice(best=best) | {"message": message}
        if not body.get("return_token_ids"):
            return {"choices": [choice | {"token_ids": None, "logprobs": None}]}
        return {"choices": [choice], "prompt_token_ids": prompt}

    def inference_v1_generate(self, body: Any) -> Any:
        spans = [{"version": "5", "start": 0, "end": len(self.sampled)}]
        return {"choices": [self._choice() | {"weight_versions": spans}]}

    def v1_chat_completions_derender(self, body: Any) -> Any:
        ids = body["generate_response"]["choices"][0]["token_ids"]
        assert ids == self.sampled
        message: dict[str, Any] = {"role": "assistant", "content": "derendered"}
        message["reasoning"] = "hm"
        if body["chat_request"].get("tools"):
            message["tool_calls"] = [{"function": {"name": "f", "arguments": "{}"}}]
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    def v1_completions(self, body: Any) -> Any:
        k, ids = body.get("prompt_logprobs"), body["prompt"]
        choice = self._choice(top="token_logprobs") | {"text": "seven", "prompt_token_ids": ids}
        if k is not None:
            if k > 20:
                words = f"Requested prompt logprobs of {k}, which is greater than max allowed: 20"
                return refusal(400, words)
            own = [
                {str(i): {"logprob": -9.0, "rank": 99, "decoded_token": self.text_of(i)}}
                for i in ids
            ]
            best = {str(200 + r): {"logprob": -1.0 - r, "rank": r} for r in range(1, k + 1)}
            choice["prompt_logprobs"] = [None, *({**entry, **best} for entry in own[1:])]
        return {"choices": [choice]}

    def weight_info(self, _: Any) -> Any:
        return {"weight_version": "5"}

    def _choice(self, top: str = "content", best: float = -0.5) -> dict[str, Any]:
        values: list[float] = [-0.5 - n for n in range(len(self.sampled))]
        told = values if top == "token_logprobs" else [
            {"logprob": v, "top_logprobs": [{"logprob": best}]} for v in values
        ]
        return {"finish_reason": self.finish, "token_ids": self.sampled, "logprobs": {top: told}}


def client_of(*urls: str, key: str | None = None, **changes: Any) -> InferenceClient:
    limits = {"max_concurrent": 16, "request_timeout_s": 20.0} | changes
    return InferenceClient(list(urls), api_key=key, **limits)


async def ask(client: InferenceClient, **changes: Any) -> Completion:
    request: dict[str, Any] = {
        "model": "m", "sampling": SAMPLING, "seed": 7, "deadline_s": 20.0, "want_tokens": True,
    }
    return await client.chat(changes.pop("messages", QUESTION), **request | changes)


def answer_with(status: int, message: str = "x", **fields: Any) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return refusal(status, message, **fields)

    return handler


async def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def stall(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()
