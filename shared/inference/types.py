"""What an inference server gave us, whatever its dialect."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollstream.shared.records import Message, Usage, VersionSpan


class Completion(msgspec.Struct, kw_only=True):
    """One answer to one request (n = 1)."""

    text: str
    message: Message
    """The assistant message, with tool_calls where the server parsed some."""
    finish_reason: str
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """The sampled tokens, the end-of-turn token included; None on a server that can't tell."""
    logprobs: list[float] | None = None
    """The sampler's own logprob of each sampled token."""
    versions: list[VersionSpan] = []
    """Policy versions over `token_ids` (start and end count from the first sampled token)."""
    usage: Usage = msgspec.field(default_factory=Usage)
    endpoint: str = ""
    attempts: int = 1


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """A teacher's view of one token sequence; row t speaks of token t given tokens[:t].

    Row 0 is empty: nothing predicts the first token.
    """

    top_ids: list[list[int]]
    """Per position the k best tokens by rank (fewer than k never, except position 0: none)."""
    top_logprobs: list[list[float]]
    own: list[float | None]
    """The logprob of the token that is there; None at position 0."""
    pieces: list[str | None] = []
    """Each token's own text, as far as the server tells; None at position 0."""


class Capabilities(msgspec.Struct, kw_only=True):
    """What a server can do, found out by asking it once."""

    models: list[str]
    generate_route: bool = False
    """vLLM's token-in/token-out route answers (`--enable-scale-out`)."""
    token_ids: bool = False
    """Chat answers carry prompt and sampled token ids (`return_token_ids`)."""
    logprobs: bool = False
    logprobs_mode: Literal["processed", "raw", ""] = ""
    """Whether sampled logprobs are the sampler's own or the model's before temperature and cuts;
    empty where the two answers that were compared don't tell."""
    prompt_logprobs: bool = False
    max_prompt_logprobs: int = 0
    tokenize: bool = False
    derender: bool = False
    """Tool calls and reasoning of sampled tokens are parsed by the server."""
    weight_version: bool = False
    """The server tells its weights' version and takes new ones (vLLM's development routes)."""
    context_tokens: int = 0
    server: str = ""
    detail: dict[str, Any] = {}
    """Per missing capability the reason, in the server's own words."""


class InferenceError(Exception):
    """A request failed; `retryable` says whether asking again may help."""

    def __init__(self, message: str, *, status: int | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class ContextOverflow(InferenceError):
    """The prompt does not fit the model's context: the model's limit, never retried."""


class ServerUnavailable(InferenceError):
    """No endpoint could be reached within the deadline, or none with the weights that are due."""
