"""Groups as a trainer reads them: Atropos' `ScoredDataGroup`, all of its fourteen fields.

Each sequence of a sample becomes a trajectory of its own with the sample's score. Numbers leave
as plain lists and are finite, so that any strict JSON reader takes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollstream.shared.arrays import unpack
from rollstream.shared.records import Distill, Group, Message, Sample, Sequence

MASKED_TOKEN = -100
MASKED_LOGPROB = 1.0
Trajectory = tuple[Sample, Sequence]


def scored_data_group(
    group: Group, *, env_id: int | None = None, send_advantages: bool = False,
    include_messages: bool = False,
) -> dict[str, Any]:
    """The group's trajectories, one list entry each in every per-sequence field.

    tokens, masks (-100 or the token's id), scores, inference_logprobs (1.0 where masked) and
    distill_token_ids / distill_logprobs ([position][rank], position 0 empty). `advantages` is a
    token-level override and null unless asked for. A group of text only, which no trainer takes,
    has null for all that is about tokens and an entry per sample. Samples without a reward are
    left out where others have one.
    """
    samples = [s for s in group.samples if s.reward is not None] or group.samples
    pairs: list[Trajectory] = [(s, q) for s in samples for q in s.sequences]
    owners = [sample for sample, _ in pairs] or samples
    messages = [[*group.row.prompt, *sample.completion] for sample in owners]
    return {
        "tokens": [_ints(q) for _, q in pairs] or None,
        "masks": [_labels(q) for _, q in pairs] or None,
        "scores": [sample.reward for sample in owners],
        "advantages": [_advantages(s, q) for s, q in pairs] if send_advantages and pairs else None,
        "ref_logprobs": _extra(pairs, "ref_logprobs"),
        "messages": [_plain(chat) for chat in messages] if include_messages else None,
        "generation_params": (samples[0].generation_params or None) if samples else None,
        "inference_logprobs": _logprobs(pairs),
        "overrides": None,
        "group_overrides": group.group_overrides or None,
        "images": None,
        "env_id": env_id,
        **_distill(pairs),
    }


def is_trainable(group: Group) -> bool:
    """Whether a trainer can learn from it: a rewarded sample with tokens and logprobs."""
    return any(
        sample.reward is not None and any(q.logprobs is not None for q in sample.sequences)
        for sample in group.samples
    )


def _ints(sequence: Sequence) -> list[int]:
    return unpack(sequence.tokens).tolist()


def _labels(sequence: Sequence) -> list[int]:
    sampled = unpack(sequence.mask) == 1
    return np.where(sampled, unpack(sequence.tokens), MASKED_TOKEN).tolist()


def _advantages(sample: Sample, sequence: Sequence) -> list[float]:
    sampled = unpack(sequence.mask) == 1
    return np.where(sampled, sample.advantage or 0.0, 0.0).tolist()


def _logprobs(pairs: list[Trajectory]) -> list[list[float]] | None:
    if not pairs or any(q.logprobs is None for _, q in pairs):
        return None
    return [
        np.where(unpack(q.mask) == 1, unpack(q.logprobs), MASKED_LOGPROB).tolist()
        for _, q in pairs if q.logprobs is not None
    ]


def _extra(pairs: list[Trajectory], name: str) -> list[list[float]] | None:
    if not pairs or any(name not in q.extra for _, q in pairs):
        return None
    return [unpack(q.extra[name]).tolist() for _, q in pairs]


def _distill(pairs: list[Trajectory]) -> dict[str, Any]:
    payloads = [(q, q.distill) for _, q in pairs if q.distill is not None]
    if not pairs or len(payloads) < len(pairs):
        return {"distill_token_ids": None, "distill_logprobs": None}
    ids, logprobs = zip(*(_ranks(q, distill) for q, distill in payloads), strict=True)
    return {"distill_token_ids": list(ids), "distill_logprobs": list(logprobs)}


def _ranks(sequence: Sequence, distill: Distill) -> tuple[list[list[int]], list[list[float]]]:
    """The teacher's k best of each position; with k = 0 the token's own logprob alone."""
    if distill.k == 0:
        ids = [[token] for token in _ints(sequence)]
        logprobs = [[value] for value in unpack(distill.own).tolist()]
    else:
        ids, logprobs = unpack(distill.token_ids).tolist(), unpack(distill.logprobs).tolist()
    return [[], *ids[1:]], [[], *logprobs[1:]]


def _plain(chat: list[Message]) -> list[Message]:
    """Atropos wants role and content in each message, content a string."""
    return [
        {**message, "role": str(message.get("role", "")), "content": message.get("content") or ""}
        for message in chat
    ]
