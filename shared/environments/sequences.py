"""The turns of a rollout as token sequences: pure, and never re-tokenising what was sampled.

Turn t+1 continues the sequence of turn t where its prompt ids begin with every token so far.
Where they do not (history rewritten, tokens rendered differently), a new sequence starts: a token
is trained on exactly where it was sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from rollstream.shared.arrays import pack
from rollstream.shared.inference.types import Completion
from rollstream.shared.records import Sequence, VersionSpan


class Turn(msgspec.Struct, frozen=True):
    """What the server told about one request; ids and logprobs are None where it can't tell."""

    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    versions: list[VersionSpan] = []
    """Over `token_ids`, counted from the first sampled token."""
    finish_reason: str = ""

    @property
    def known(self) -> bool:
        return self.prompt_ids is not None and self.token_ids is not None


class Place(NamedTuple):
    """Where a turn lies in its sequence: prompt [0, start), sampled tokens [start, end)."""

    sequence: int
    start: int
    end: int


def turn_of(completion: Completion) -> Turn:
    """The tokens of one answer."""
    return Turn(
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
    )


def build(turns: list[Turn]) -> list[Sequence]:
    """All turns as sequences, in order; none where any turn's ids are unknown (text only).

    A sequence has logprobs only where all its turns have them. Raises ValueError where logprobs
    and sampled tokens differ in number or a logprob is not finite.
    """
    return [_pack(chain) for chain in _chains(turns)]


def places(turns: list[Turn]) -> list[Place]:
    """Per turn where `build` put it; empty where `build` gives no sequences."""
    return [
        Place(number, start, start + len(turn.token_ids or []))
        for number, chain in enumerate(_chains(turns))
        for turn in chain
        for start in [len(turn.prompt_ids or [])]
    ]


def _chains(turns: list[Turn]) -> list[list[Turn]]:
    """Turns grouped by the sequence they share."""
    if not all(turn.known for turn in turns):
        return []
    chains: list[list[Turn]] = []
    so_far: list[int] = []
    for turn in turns:
        prompt_ids, token_ids = turn.prompt_ids or [], turn.token_ids or []
        if not chains or prompt_ids[: len(so_far)] != so_far:
            chains.append([])
        chains[-1].append(turn)
        so_far = prompt_ids + token_ids
    return chains


def _pack(chain: list[Turn]) -> Sequence:
    last = chain[-1]
    tokens = (last.prompt_ids or []) + (last.token_ids or [])
    mask = np.zeros(len(tokens), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    versions: list[VersionSpan] = []
    for turn in chain:
        start = len(turn.prompt_ids or [])
        end = start + len(turn.token_ids or [])
        mask[start:end] = 1
        if turn.logprobs is not None:
            if len(turn.logprobs) != end - start:
                raise ValueError(f"{len(turn.logprobs)} logprobs for {end - start} sampled tokens")
            logprobs[start:end] = turn.logprobs
        versions += [
            VersionSpan(span.version, span.start + start, span.end + start)
            for span in turn.versions
        ]
    complete = all(turn.logprobs is not None for turn in chain)
    return Sequence(
        tokens=pack(tokens, "int32"),
        mask=pack(mask, "uint8"),
        logprobs=pack(logprobs, "float32") if complete else None,
        versions=versions,
    )
