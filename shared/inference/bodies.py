"""What we ask inference servers: routes and request bodies of the three dialects, pure functions.

vLLM chat with `return_token_ids`; vLLM token-in/token-out (`/inference/v1/generate`, and
`/v1/completions` with ids as the prompt); any OpenAI-compatible chat (text only).
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollstream.shared.inference.faults import Lessons
from rollstream.shared.records import Message

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DERENDER = "/v1/chat/completions/derender"
DETOKENIZE = "/detokenize"
GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
TOKENIZE = "/tokenize"
VERSION = "/version"
WEIGHT_INFO = "/weight_info"
SAMPLING = frozenset({CHAT, COMPLETIONS, GENERATE})
"""Routes on which tokens are sampled."""

ON_POLICY: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
}
"""Sent with every token request: unset, a server takes them from the model's generation_config.json
on one route and not on another, and turns would be sampled from different distributions."""

TEMPLATE_KEYS = frozenset({"chat_template", "chat_template_kwargs"})
"""Sampling keys that go to the chat template, so to chat and /tokenize but not to token routes."""
TOKEN_ROUTE_KEYS = TEMPLATE_KEYS | {
    *ON_POLICY, "max_tokens", "min_tokens", "stop", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "seed", "ignore_eos", "logit_bias", "skip_special_tokens",
    "include_stop_str_in_output", "bad_words", "allowed_token_ids",
}
"""Sampling keys that mean the same on the token routes; with any other a turn goes through chat."""


def chat_body(
    model: str,
    messages: list[Message],
    sampling: dict[str, Any],
    *,
    tools: list[dict[str, Any]] | None,
    seed: int | None,
    want_tokens: bool,
    lessons: Lessons | None = None,
) -> dict[str, Any]:
    """A chat request for one answer."""
    body = {"model": model, "messages": messages, **_sampling(sampling, seed, want_tokens)}
    if tools:
        body["tools"] = tools
    if want_tokens:
        body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    return lessons.apply(body) if lessons else body


def generate_body(
    model: str, ids: list[int], sampling: dict[str, Any], seed: int | None
) -> dict[str, Any]:
    """A token-in/token-out request; `sampling_params` is vLLM's SamplingParams."""
    params = _sampling(sampling, seed, True, TEMPLATE_KEYS) | {"n": 1, "logprobs": 1}
    return {"model": model, "token_ids": ids, "sampling_params": params}


def completions_body(
    model: str, ids: list[int], sampling: dict[str, Any], seed: int | None
) -> dict[str, Any]:
    """A completions request with ids as the prompt, sampled ids and logprobs asked for."""
    params = _sampling(sampling, seed, True, TEMPLATE_KEYS)
    return {"model": model, "prompt": ids, **params, "logprobs": 0, "return_token_ids": True}


def score_body(model: str, ids: list[int], k: int) -> dict[str, Any]:
    """A completions request for the k best tokens of every prompt position."""
    return {
        "model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": k,
        "return_token_ids": True,
    }


def tokenize_body(
    model: str,
    messages: list[Message],
    sampling: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """A request for the ids that a chat request with these messages would put before the model."""
    template = {k: v for k, v in sampling.items() if k in TEMPLATE_KEYS}
    body = {"model": model, "messages": messages, "add_generation_prompt": True, **template}
    return body | ({"tools": tools} if tools else {})


def derender_body(
    model: str, generated: bytes, prompt_tokens: int, chat: dict[str, Any]
) -> dict[str, Any]:
    """A request to turn a generate answer into a chat answer by the server's own parsers."""
    return {
        "model": model, "generate_response": msgspec.Raw(generated),
        "prompt_tokens": prompt_tokens, "chat_request": chat,
    }


def size_tokens(body: dict[str, Any]) -> int:
    """About how many tokens a request takes at the server: its prompt and its budget.

    A message's text is counted as four characters a token; a budget that is not named as nothing.
    """
    params = body.get("sampling_params", body)
    budget = params.get("max_tokens") or params.get("max_completion_tokens") or 0
    ids = body.get("token_ids") or body.get("prompt")
    if ids is not None:
        return len(ids) + budget
    return sum(len(str(m.get("content"))) for m in body.get("messages", [])) // 4 + budget


def _sampling(
    sampling: dict[str, Any],
    seed: int | None,
    on_policy: bool,
    leave_out: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    if sampling.get("n", 1) != 1:
        raise ValueError(f"sampling.n is {sampling['n']}: a request is for one answer, use n = 1")
    params = (ON_POLICY if on_policy else {}) | sampling
    if "max_completion_tokens" in params:
        params["max_tokens"] = params.pop("max_completion_tokens")
    if (budget := params.get("max_tokens")) is not None and budget < 1:
        raise ValueError(f"sampling.max_tokens is {budget}: a request needs at least 1")
    if seed is not None:
        params["seed"] = seed
    return {k: v for k, v in params.items() if k != "n" and k not in leave_out and v is not None}
