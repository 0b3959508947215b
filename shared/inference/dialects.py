"""What servers answer, in each dialect that `bodies` asks in; pure functions of an answer's bytes.

Shapes as vLLM 0.32 answers. What can't be true (lengths that differ, a logprob that is no number)
raises InferenceError, not retryable: it would be wrong training data.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from rollstream.shared.inference.types import Completion, InferenceError, PromptLogprobs
from rollstream.shared.policy import version_of
from rollstream.shared.records import Message, Usage, VersionSpan

_NO_NUMBER = -9999.0
"""vLLM writes this where JSON can't write -inf."""

T = TypeVar("T")


class _Tokens(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Tokens | None = None
    completion_tokens_details: _Tokens | None = None
    cost: float | None = None


class _Best(msgspec.Struct):
    logprob: float | None = None


class _Sampled(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None
    top_logprobs: list[_Best] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Sampled] | None = None
    """Chat and generate."""
    token_logprobs: list[float | None] | None = None
    """Completions."""


class _Entry(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None
    decoded_token: str | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class Tokenized(msgspec.Struct):
    """Answer of /tokenize."""

    tokens: list[int]
    max_model_len: int | None = None


class _Detokenized(msgspec.Struct):
    prompt: str


class _Version(msgspec.Struct):
    version: str


class _WeightInfo(msgspec.Struct):
    weight_version: str | int


def parse_chat(body: bytes, *, want_tokens: bool) -> Completion:
    """A chat answer; with `want_tokens` its prompt ids, sampled ids and logprobs, checked."""
    answer, choice = _first_choice(body)
    if choice.message is None:
        raise _wrong("the choice has no message")
    done = _completion(answer, choice, _clean(choice.message))
    return _with_tokens(done, answer, choice, None) if want_tokens else done


def has_logprobs(body: bytes) -> bool:
    """Whether a chat answer carries logprobs."""
    _, choice = _first_choice(body)
    return bool(choice.logprobs and choice.logprobs.content)


def parse_best_logprob(body: bytes) -> float:
    """The first position's best logprob in a chat answer."""
    _, choice = _first_choice(body)
    content = choice.logprobs.content if choice.logprobs else None
    best = (content[0].top_logprobs if content else None) or []
    if not best:
        raise _wrong("the answer has no top_logprobs")
    return max(_number(one.logprob, "top_logprobs") for one in best)


def parse_completion(body: bytes, prompt_ids: list[int]) -> Completion:
    """A completions answer to a prompt of ids."""
    answer, choice = _first_choice(body)
    message = {"role": "assistant", "content": choice.text or ""}
    return _with_tokens(_completion(answer, choice, message), answer, choice, prompt_ids)


def parse_generate(body: bytes, prompt_ids: list[int]) -> Completion:
    """A generate answer; its text is empty, the caller finds it."""
    answer, choice = _first_choice(body)
    message = {"role": "assistant", "content": ""}
    return _with_tokens(_completion(answer, choice, message), answer, choice, prompt_ids)


def parse_derendered(body: bytes) -> Message:
    """The message of a derendered answer, tool calls and reasoning parsed."""
    _, choice = _first_choice(body)
    if choice.message is None:
        raise _wrong("the derendered choice has no message")
    return _clean(choice.message)


def parse_prompt_logprobs(body: bytes, ids: list[int], k: int) -> PromptLogprobs:
    """A teacher's answer for `ids`: per position its k best by rank, and the token's own logprob.

    Entries are keyed by token id, k + 1 of them or k where the own token is among the best.
    """
    answer, choice = _first_choice(body)
    echoed = choice.prompt_token_ids or answer.prompt_token_ids
    if echoed is not None and echoed != ids:
        raise _wrong(f"prompt_token_ids are not the {len(ids)} ids that were sent")
    rows = choice.prompt_logprobs
    if rows is None:
        raise _wrong("the answer has no prompt_logprobs")
    if len(rows) != len(ids):
        raise _wrong(f"prompt_logprobs has {len(rows)} positions for {len(ids)} tokens")
    scored = PromptLogprobs(top_ids=[[]], top_logprobs=[[]], own=[None], pieces=[None])
    for at, (token, row) in enumerate(zip(ids[1:], rows[1:], strict=True), start=1):
        if row is None or token not in row:
            raise _wrong(f"prompt_logprobs[{at}] lacks the prompt's own token {token}")
        best = sorted((e.rank, i) for i, e in row.items() if e.rank is not None and e.rank <= k)
        if [rank for rank, _ in best] != list(range(1, k + 1)):
            raise _wrong(f"prompt_logprobs[{at}] has ranks {[r for r, _ in best]}, not 1 to {k}")
        where = f"prompt_logprobs[{at}]"
        scored.top_ids.append([i for _, i in best])
        scored.top_logprobs.append([_number(row[i].logprob, where) for _, i in best])
        scored.own.append(_number(row[token].logprob, where))
        scored.pieces.append(row[token].decoded_token)
    return scored


def parse_models(body: bytes) -> tuple[list[str], str]:
    """The models' ids, and who says to own the first of them (vLLM says `vllm`)."""
    models = _decode(body, _Models).data
    return [model.id for model in models], models[0].owned_by if models else ""


def parse_tokenized(body: bytes) -> Tokenized:
    """The ids of /tokenize, and the model's context length where it is told."""
    return _decode(body, Tokenized)


def parse_detokenized(body: bytes) -> str:
    """The text of /detokenize."""
    return _decode(body, _Detokenized).prompt


def parse_version(body: bytes) -> str:
    """The server's version."""
    return _decode(body, _Version).version


def parse_weight_version(body: bytes) -> str:
    """What /weight_info says of the weights."""
    return str(_decode(body, _WeightInfo).weight_version)


def waiting_requests(metrics: bytes) -> float:
    """Requests that wait at the server, of its Prometheus page; 0 where that says nothing."""
    return sum(
        float(line.rsplit(b" ", 1)[-1]) for line in metrics.splitlines()
        if line.startswith((b"vllm:num_requests_waiting{", b"vllm:num_requests_waiting "))
    )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        start = " ".join(body[:80].decode(errors="replace").split())
        raise _wrong(f"{error}; it starts with {start!r}") from error


def _first_choice(body: bytes) -> tuple[_Answer, _Choice]:
    answer = _decode(body, _Answer)
    if not answer.choices:
        raise _wrong("the answer has no choice")
    return answer, answer.choices[0]


def _completion(answer: _Answer, choice: _Choice, message: Message) -> Completion:
    content = message.get("content")
    return Completion(
        text=content if isinstance(content, str) else "",
        message=message,
        finish_reason=choice.finish_reason or "",
        usage=_usage(answer.usage),
    )


def _with_tokens(
    done: Completion, answer: _Answer, choice: _Choice, prompt_ids: list[int] | None
) -> Completion:
    sampled = choice.token_ids
    if sampled is None:
        raise _wrong("the answer has no token_ids (vLLM gives them for return_token_ids)")
    logprobs = _sampled_logprobs(choice, sampled)
    told = answer.prompt_token_ids or choice.prompt_token_ids
    if prompt_ids is not None and told is not None and told != prompt_ids:
        raise _wrong(f"prompt_token_ids are not the {len(prompt_ids)} ids that were sent")
    done.prompt_ids = prompt_ids or told
    if not done.prompt_ids:
        raise _wrong("the answer has no prompt_token_ids")
    done.token_ids, done.logprobs = sampled, logprobs
    done.versions = _versions(choice.weight_versions or [], len(sampled))
    done.usage.prompt_tokens = done.usage.prompt_tokens or len(done.prompt_ids)
    done.usage.completion_tokens = done.usage.completion_tokens or len(sampled)
    return done


def _sampled_logprobs(choice: _Choice, sampled: list[int]) -> list[float]:
    told = choice.logprobs or _Logprobs()
    if told.content is not None:
        values = [entry.logprob for entry in told.content]
        ids = [entry.token_id for entry in told.content]
        if any(a != b for a, b in zip(ids, sampled, strict=False) if a is not None):
            raise _wrong("logprobs.content speaks of other tokens than token_ids")
    else:
        values = told.token_logprobs
    if values is None:
        # An abort before the first token leaves nothing to speak of.
        values = [] if not sampled else None
    if values is None:
        raise _wrong("the answer has no logprobs")
    if len(values) != len(sampled):
        raise _wrong(f"{len(values)} logprobs for {len(sampled)} token_ids")
    return [_number(value, f"logprobs[{at}]") for at, value in enumerate(values)]


def _versions(told: list[_Span], length: int) -> list[VersionSpan]:
    """Spans with numbers; none where a label names no version."""
    spans: list[VersionSpan] = []
    for span in told:
        version = version_of(str(span.version))
        if version is None:
            return []
        spans.append(VersionSpan(version=version, start=span.start, end=span.end))
    edges = [0, *(span.end for span in spans)]
    if spans and ([s.start for s in spans] != edges[:-1] or edges[-1] != length):
        raise _wrong(f"weight_versions {told} don't cover the {length} sampled tokens")
    return spans


def _usage(told: _Usage | None) -> Usage:
    told = told or _Usage()
    prompt, completion = told.prompt_tokens_details, told.completion_tokens_details
    return Usage(
        prompt_tokens=told.prompt_tokens or 0,
        completion_tokens=told.completion_tokens or 0,
        cached_tokens=(prompt.cached_tokens or 0) if prompt else 0,
        reasoning_tokens=(completion.reasoning_tokens or 0) if completion else 0,
        requests=1,
        cost_usd=told.cost,
    )


def _clean(message: dict[str, Any]) -> Message:
    """The message without the fields that a server fills with nothing."""
    kept = {k: v for k, v in message.items() if v not in (None, [], {}) or k == "content"}
    return {"role": "assistant", "content": None} | kept


def _number(value: float | None, where: str) -> float:
    if value is None or not math.isfinite(value) or value <= _NO_NUMBER:
        raise _wrong(f"{where} is {value}, which is no logprob")
    return value


def _wrong(what: str) -> InferenceError:
    return InferenceError(f"the server's answer can't be used: {what}")
