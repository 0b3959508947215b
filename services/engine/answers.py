"""The pieces of answers that several routes share, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rollstream.services.engine.sequences import PromptScores, Sequence, TokenChoice
from rollstream.services.engine.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM's floor for tokens that were cut away


def json_answer(body: Any, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response."""
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers=headers
    )


def usage(sequences: list[Sequence]) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once however many choices it has."""
    prompts = {id(s.prompt): s for s in reversed(sequences)}.values()
    prompt = sum(len(s.prompt) for s in prompts)
    completion = sum(len(s.output) for s in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompts)},
    }


def token_label(tokenizer: Tokenizer, token: int, as_id: bool) -> str:
    """How a logprob names its token."""
    return f"token_id:{token}" if as_id else tokenizer.token_text(token)


def ranked(choice: TokenChoice, k: int) -> list[tuple[int, float]]:
    """The sampled token first, then the other best; one more than k where it isn't among them."""
    others = [(i, p) for i, p in choice.top[:k] if i != choice.token]
    best = [(choice.token, choice.logprob), *others]
    return [(i, max(p, _LOWEST_LOGPROB)) for i, p in best]


def chat_logprobs(
    tokenizer: Tokenizer, choices: list[TokenChoice], k: int, as_ids: bool
) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {
            "token": token_label(tokenizer, token, as_ids),
            "logprob": logprob,
            "bytes": list(text.encode()),
        }

    return {
        "content": [
            entry(choice.token, max(choice.logprob, _LOWEST_LOGPROB))
            | {"top_logprobs": [entry(i, p) for i, p in ranked(choice, k)] if k else []}
            for choice in choices
        ]
    }


def generate_logprobs(choices: list[TokenChoice], k: int) -> dict[str, Any]:
    """`logprobs` of a token-in/token-out choice: ids instead of texts."""

    def entry(choice: TokenChoice) -> dict[str, Any]:
        # Among equals the place in the list counts, as in vLLM: the k best have ranks 1 to k.
        ranks = {choice.token: choice.rank}
        ranks |= {token: place for place, (token, _) in enumerate(choice.top[:k], 1)}
        best = [
            {"token_id": i, "logprob": p, "rank": ranks[i]} for i, p in ranked(choice, k)
        ]
        return best[0] | {"top_logprobs": best if k else []}

    return {"content": [entry(choice) for choice in choices]}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: list[int], scores: PromptScores, k: int
) -> list[dict[str, Any] | None]:
    """One entry a prompt token: null, then the token itself first and the k best, keyed by id."""
    own, rank = scores.own.tolist(), scores.rank.tolist()
    top_ids, top_logprobs = scores.top_ids[:, :k].tolist(), scores.top_logprobs[:, :k].tolist()
    text = tokenizer.token_text
    rows: list[dict[str, Any] | None] = [None]
    for t in range(1, len(prompt)):
        token = prompt[t]
        row: dict[str, Any] = {
            str(token): {"logprob": own[t], "rank": rank[t], "decoded_token": text(token)}
        }
        for place, (other, logprob) in enumerate(zip(top_ids[t], top_logprobs[t], strict=True), 1):
            # Where the token is one of the best its place there counts: ranks run from 1 to k.
            row[str(other)] = {"logprob": logprob, "rank": place, "decoded_token": text(other)}
        rows.append(row)
    return rows


def prompt_logprobs_of(tokenizer: Tokenizer, sequence: Sequence) -> list[dict[str, Any] | None]:
    """As `prompt_logprobs`; null rows only where the sequence was aborted before its scores."""
    k = sequence.sampling.prompt_logprobs
    if k is None or sequence.prompt_scores is None:
        return [None] * len(sequence.prompt)
    return prompt_logprobs(tokenizer, sequence.prompt, sequence.prompt_scores, k)
