"""What is asked for and what came of it so far: the words of scheduler and executors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one sequence; temperature 0 is greedy, top_k 0 and top_p 1 cut nothing."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives wanted beside each sampled token's own logprob; None: not even that."""
    prompt_logprobs: int | None = None


class TokenChoice(NamedTuple):
    """One sampled token with the sampler's own logprob, after temperature, top_k and top_p."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    """The best alternatives by rank, the token itself included where it is one of them."""


class PromptScores(NamedTuple):
    """The model's own view of given tokens, one row a token (temperature 1, nothing cut)."""

    own: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    """[tokens, k] by rank"""
    top_logprobs: NDArray[np.float32]

    def rows(self, start: int, end: int) -> PromptScores:
        """A copy of some rows."""
        return PromptScores(
            self.own[start:end].copy(), self.rank[start:end].copy(),
            self.top_ids[start:end].copy(), self.top_logprobs[start:end].copy(),
        )


def joined(parts: list[PromptScores]) -> PromptScores:
    """Rows of several, one after another."""
    return PromptScores(
        np.concatenate([p.own for p in parts]), np.concatenate([p.rank for p in parts]),
        np.concatenate([p.top_ids for p in parts]),
        np.concatenate([p.top_logprobs for p in parts]),
    )


class Span(NamedTuple):
    """Output tokens start..end were sampled by this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request; only the scheduler's thread writes to it."""

    request_id: str
    index: int
    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    scripted: list[int] | None = None
    """Given output tokens (script mode); None where the model decides."""

    output: list[int] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    """Row 0 means nothing: no token precedes the first."""
    cached_tokens: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    def append(self, choice: TokenChoice, version: str) -> None:
        """Takes the next sampled token."""
        at = len(self.output)
        self.output.append(choice.token)
        self.choices.append(choice)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version, self.spans[-1].start, at + 1)
        else:
            self.spans.append(Span(version, at, at + 1))
