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
_SAME = 1e-4
"""Logprobs that differ by less are equal, and a token with less is as good as certain."""
_MANY_LOGPROBS = 1000
"""More than any teacher payload; vLLM refuses it with its limit in the message (20 by default)."""


async def probe(ask: Ask, model: str | None) -> Capabilities:
    """What the server can do for `model` (its first where None).

    Costs at most seven sampled tokens. Raises InferenceError where a request fails by what may
    pass, or where the server takes no key: nothing would be learnt from that.
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
        return found
    if found.token_ids:
        await _probe_logprobs_mode(ask, found, model)
    await _probe_generate(ask, found, model, ids)
    await _probe_prompt_logprobs(ask, found, model, ids)
    await _probe_weight_version(ask, found)
    return found


async def _server(ask: Ask, owner: str) -> str:
    try:
        version = dialects.parse_version(await ask(bodies.VERSION, None))
    except InferenceError:
        return owner
    return f"{owner} {version}".strip()


async def _probe_tokenize(ask: Ask, found: Capabilities, model: str) -> list[int]:
    body = bodies.tokenize_body(model, _QUESTION, {}, None)
    try:
        told = dialects.parse_tokenized(await ask(bodies.TOKENIZE, body))
    except InferenceError as error:
        found.detail["tokenize"] = _reason(error)
        return []
    found.tokenize, found.context_tokens = True, told.max_model_len or 0
    return told.tokens


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


async def _probe_logprobs_mode(ask: Ask, found: Capabilities, model: str) -> None:
    """No server says it: the best token's logprob at two temperatures does."""
    best = []
    for temperature in (1.0, 2.0):
        sampling = _ONE_TOKEN | {"temperature": temperature}
        body = bodies.chat_body(
            model, _QUESTION, sampling, tools=None, seed=0, want_tokens=True
        ) | {"top_logprobs": 1}
        try:
            best.append(dialects.parse_best_logprob(await ask(bodies.CHAT, body)))
        except InferenceError as error:
            found.detail["logprobs_mode"] = _reason(error)
            return
    if abs(best[0] - best[1]) > _SAME:
        found.logprobs_mode = "processed"
    elif best[0] < -_SAME:
        found.logprobs_mode = "raw"
    else:
        found.detail["logprobs_mode"] = "the model is certain of its answer at any temperature"


async def _probe_weight_version(ask: Ask, found: Capabilities) -> None:
    try:
        dialects.parse_weight_version(await ask(bodies.WEIGHT_INFO, None))
    except InferenceError as error:
        found.detail["weight_version"] = _reason(error)
    else:
        found.weight_version = True


async def _probe_generate(ask: Ask, found: Capabilities, model: str, ids: list[int]) -> None:
    try:
        generated = await ask(
            bodies.GENERATE, bodies.generate_body(model, ids, _ONE_TOKEN, None)
        )
        dialects.parse_generate(generated, ids)
    except InferenceError as error:
        found.detail["generate_route"] = found.detail["derender"] = _reason(error)
        return
    found.generate_route = True
    chat = bodies.chat_body(model, _QUESTION, {}, tools=None, seed=None, want_tokens=False)
    body = bodies.derender_body(model, generated, len(ids), chat)
    try:
        dialects.parse_derendered(await ask(bodies.DERENDER, body))
    except InferenceError as error:
        found.detail["derender"] = _reason(error)
    else:
        found.derender = True


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
