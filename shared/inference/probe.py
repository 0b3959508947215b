"""Finding out what a server can do: by asking it, never by its URL or its name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from rollstream.shared.inference import bodies, dialects
from rollstream.shared.inference.types import Capabilities, Completion, InferenceError

Ask = Callable[[str, dict[str, Any] | None], Awaitable[bytes]]
"""POST a body to a path, or GET where there is none; the answer's bytes."""

_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Say hi."}]
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1}
_MANY_LOGPROBS = 1000
"""More than any teacher payload; vLLM refuses it with its limit in the message (20 by default)."""


async def probe(ask: Ask, model: str | None) -> tuple[Capabilities, bool]:
    """What the server can do for `model` (its first where None), and whether it can derender.

    Costs at most five sampled tokens. Raises InferenceError where a request fails by what may pass,
    or where the server takes no key: nothing would be learnt from that.
    """
    found = Capabilities(models=[])
    owner = ""
    try:
        found.models, owner = dialects.parse_models(await ask(bodies.MODELS, None))
    except InferenceError as error:
        found.detail["models"] = _reason(error)
    model = model or next(iter(found.models), None)
    if model is None:
        raise InferenceError(f"no model is named and the server lists none: {found.detail}")
    found.server = await _server(ask, owner)

    ids = await _probe_tokenize(ask, found, model)
    sampled = await _probe_chat(ask, found, model)
    ids = (sampled.prompt_ids if sampled else None) or ids
    if not ids:
        without = "there are no token ids to ask with"
        found.detail |= {"generate_route": without, "prompt_logprobs": without}
        return found, False
    derenders = await _probe_generate(ask, found, model, ids)
    await _probe_prompt_logprobs(ask, found, model, ids)
    return found, derenders


async def _server(ask: Ask, owner: str) -> str:
    try:
        version = dialects.parse_version(await ask(bodies.VERSION, None))
    except InferenceError:
        return owner
    return f"{owner} {version}".strip()


async def _probe_tokenize(ask: Ask, found: Capabilities, model: str) -> list[int]:
    body = bodies.tokenize_body(model, _QUESTION, {}, None)
    try:
        ids = dialects.parse_tokenized(await ask(bodies.TOKENIZE, body)).tokens
    except InferenceError as error:
        found.detail["tokenize"] = _reason(error)
        return []
    found.tokenize = True
    return ids


async def _probe_chat(ask: Ask, found: Capabilities, model: str) -> Completion | None:
    """Token ids with logprobs; else, for a server that refuses the fields, logprobs alone."""
    body = bodies.chat_body(
        model, _QUESTION, _ONE_TOKEN, tools=None, seed=None, want_tokens=True
    )
    try:
        done = dialects.parse_chat(await ask(bodies.CHAT, body), want_tokens=True)
    except InferenceError as error:
        found.detail["token_ids"] = _reason(error)
    else:
        found.token_ids = found.logprobs = True
        found.detail["logprobs_mode"] = (
            "the server doesn't tell whether logprobs are the sampler's own: start vLLM with "
            "--logprobs-mode processed_logprobs, or sample at temperature 1 without truncation"
        )
        return done
    body = {"model": model, "messages": _QUESTION, **_ONE_TOKEN, "logprobs": True}
    try:
        found.logprobs = dialects.has_logprobs(await ask(bodies.CHAT, body))
        reason = "the answer has no logprobs"
    except InferenceError as error:
        reason = _reason(error)
    if not found.logprobs:
        found.detail["logprobs"] = reason
    return None


async def _probe_generate(ask: Ask, found: Capabilities, model: str, ids: list[int]) -> bool:
    try:
        generated = await ask(
            bodies.GENERATE, bodies.generate_body(model, ids, _ONE_TOKEN, None)
        )
        dialects.parse_generate(generated, ids)
    except InferenceError as error:
        found.detail["generate_route"] = _reason(error)
        return False
    found.generate_route = True
    chat = bodies.chat_body(model, _QUESTION, {}, tools=None, seed=None, want_tokens=False)
    body = bodies.derender_body(model, generated, len(ids), chat)
    try:
        dialects.parse_derendered(await ask(bodies.DERENDER, body))
    except InferenceError as error:
        found.detail["derender"] = _reason(error)
        return False
    return True


async def _probe_prompt_logprobs(ask: Ask, found: Capabilities, model: str, ids: list[int]) -> None:
    ids = ids[:2] if len(ids) > 1 else ids * 2
    try:
        answer = await ask(bodies.COMPLETIONS, bodies.score_body(model, ids, 1))
        dialects.parse_prompt_logprobs(answer, ids, 1)
    except InferenceError as error:
        found.detail["prompt_logprobs"] = _reason(error)
        return
    found.prompt_logprobs, found.max_prompt_logprobs = True, 1
    try:
        answer = await ask(bodies.COMPLETIONS, bodies.score_body(model, ids, _MANY_LOGPROBS))
        dialects.parse_prompt_logprobs(answer, ids, _MANY_LOGPROBS)
    except InferenceError as error:
        reason = _reason(error)
        limit = re.search(r"max(?:imum)? allowed\D{0,3}(\d+)", reason)
        if limit is None:
            found.detail["max_prompt_logprobs"] = reason
        else:
            found.max_prompt_logprobs = int(limit.group(1))
    else:
        found.max_prompt_logprobs = _MANY_LOGPROBS


def _reason(error: InferenceError) -> str:
    """Why the server can't; raises the error where it says nothing about that."""
    if error.retryable or error.status == 401:
        raise error
    return str(error)
