"""Request bodies as clients send them, checked, and the sampling they ask for."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.sequences import Sampling

NonNegative = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1, le=256)]
TokenIds = list[NonNegative]

# What vLLM understands and this engine doesn't, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "min_tokens": (0,), "bad_words": ([],),
    "allowed_token_ids": (), "best_of": (1,), "use_beam_search": (False,), "suffix": ("",),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "include_stop_str_in_output": (False,), "continue_final_message": (False,),
    "truncate_prompt_tokens": (), "prompt_embeds": (), "prompt_logprob_token_ids": (),
    "skip_reading_prefix_cache": (False,),
}


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields of vLLM's SamplingParams that every route takes."""

    n: Count | None = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1)] | None = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: NonNegative | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class RequestFields(SamplingFields, kw_only=True):
    """What chat and completions share beside the sampling."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    request_id: str | None = None
    priority: int = 0


class ChatBody(RequestFields, kw_only=True):
    """/v1/chat/completions"""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: NonNegative | None = 0


class CompletionBody(RequestFields, kw_only=True):
    """/v1/completions"""

    prompt: str | list[str | NonNegative | TokenIds]
    """A text, its token ids, or a list of either."""
    max_tokens: NonNegative | None = 16
    echo: bool | None = False
    logprobs: NonNegative | None = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /inference/v1/generate"""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: NonNegative | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """/inference/v1/generate"""

    token_ids: Annotated[TokenIds, Meta(min_length=1)]
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    priority: int = 0
    stream: bool | None = False
    output_mode: str | None = "tokens"


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: `prompt` or `messages`"""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize"""

    tokens: TokenIds
    model: str | None = None


Body = TypeVar("Body")


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The request's JSON as `kind`. Raises ApiError that names the field."""
    raw = await request.read()
    try:
        fields = msgspec.json.decode(raw or b"{}")
    except msgspec.DecodeError as error:
        raise ApiError(f"the body is no JSON: {error}") from error
    if isinstance(fields, dict):
        refuse_unsupported(fields)
        if isinstance(inner := fields.get("sampling_params"), dict):
            refuse_unsupported(inner)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`") or _missing_field(message)
        raise ApiError(f"{name}: {message}" if name else message, param=name) from error


def _missing_field(message: str) -> str | None:
    parts = message.split("`")
    return parts[1] if "required field" in message and len(parts) > 1 else None


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raises ApiError for a field that would have to change the answer but can't here."""
    for name, neutral in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise ApiError(f"{name}={value!r} is not supported by this engine", param=name)


def sampling_from(
    fields: SamplingFields, *, max_tokens: int, logprobs: int | None, max_logprobs: int
) -> Sampling:
    """The sampling that these fields ask for; null means the default. Raises ApiError."""
    for name, value in (
        ("prompt logprobs", fields.prompt_logprobs), ("sample logprobs", logprobs),
    ):
        if value is not None and value > max_logprobs:
            raise ApiError(
                f"Requested {name} of {value}, which is greater than max allowed: {max_logprobs}",
                param="prompt_logprobs" if name.startswith("prompt") else "logprobs",
            )
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if "" in stop:
        raise ApiError("stop: a stop string can't be empty", param="stop")
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        seed=fields.seed,
        stop=tuple(stop),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=fields.ignore_eos,
        skip_special_tokens=fields.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )
