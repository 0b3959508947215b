"""From logits to tokens and logprobs.

A sampled token's logprob is that of the distribution it was drawn from: after temperature, top_k
and top_p, renormalised (vLLM: `--logprobs-mode processed_logprobs`). Greedy choices
(temperature 0) report the model's own logprob at temperature 1, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rollstream.services.engine.sequences import PromptScores, Sampling, TokenChoice
from rollstream.services.engine.weights import Floats

_BLOCK = 256
_SCORE_ROWS = 64


def choose(
    logits: Floats, samplings: list[Sampling], generators: list[np.random.Generator]
) -> list[TokenChoice]:
    """One token a row of logits [rows, vocab], which are overwritten.

    Each row takes exactly one number from its generator, whatever else is in the batch.
    """
    temperatures = np.array([s.temperature or 1.0 for s in samplings], np.float32)
    if np.any(temperatures != 1.0):
        logits /= temperatures[:, None]
    for row, sampling in zip(logits, samplings, strict=True):
        if sampling.temperature > 0:
            _truncate(row, sampling)
    best = logits.argmax(-1)
    highest = logits[np.arange(len(logits)), best][:, None]
    weights = np.exp(logits - highest)
    starts = np.arange(0, logits.shape[1], _BLOCK)
    blocks = np.add.reduceat(weights, starts, axis=1).cumsum(axis=1, dtype=np.float64)
    log_total = highest[:, 0] + np.log(blocks[:, -1])
    choices = []
    for i, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        drawn = generator.random()
        greedy = sampling.temperature == 0
        token = int(best[i]) if greedy else _invert(weights[i], blocks[i], drawn)
        choices.append(_choice(logits[i], token, float(log_total[i]), sampling.logprobs))
    return choices


def _truncate(row: Floats, sampling: Sampling) -> None:
    """Sets what top_k, then top_p, cut away to -inf; at least one token stays."""
    k, p = sampling.top_k, sampling.top_p
    if 0 < k < len(row):
        row[row < np.partition(row, -k)[-k]] = -np.inf
    if p < 1.0:
        order = np.argsort(row)[::-1]
        shares = np.exp(row[order].astype(np.float64) - row[order[0]])
        mass_before = (np.cumsum(shares) - shares) / shares.sum()
        row[order[mass_before >= p]] = -np.inf


def _invert(weights: Floats, blocks: NDArray[np.float64], drawn: float) -> int:
    """The token at `drawn` (0..1) of the cumulated weights, found by block and then within it."""
    target = drawn * blocks[-1]
    block = int(np.searchsorted(blocks, target, side="right"))
    block = min(block, len(blocks) - 1)
    before = float(blocks[block - 1]) if block else 0.0
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    # A block's float32 sum and its float64 cumulation differ by rounding: stay within the block.
    at = min(float(target) - before, np.nextafter(inside[-1], 0.0))
    return block * _BLOCK + int(np.searchsorted(inside, at, side="right"))


def _choice(row: Floats, token: int, log_total: float, wanted: int | None) -> TokenChoice:
    logprob = float(row[token]) - log_total
    if wanted is None:
        return TokenChoice(token, logprob, 0, [])
    rank = int(np.count_nonzero(row >= row[token]))
    if wanted == 0:
        return TokenChoice(token, logprob, rank, [])
    ids = _top(row[None], wanted)[0]
    return TokenChoice(token, logprob, rank, [(int(i), float(row[i]) - log_total) for i in ids])


def score_rows(logits: Floats, targets: NDArray[np.int64], k: int) -> PromptScores:
    """Logprob and rank of each row's target, and the row's k best tokens."""
    rows = np.arange(len(logits))
    highest = logits.max(-1, keepdims=True)
    log_total = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1))
    own = logits[rows, targets]
    rank = np.count_nonzero(logits >= own[:, None], axis=1)
    ids = _top(logits, k)
    best = np.take_along_axis(logits, ids, axis=1) - log_total[:, None]
    return PromptScores(
        own - log_total, rank.astype(np.int32), ids.astype(np.int32), best.astype(np.float32)
    )


def row_batches(count: int) -> Iterator[slice]:
    """Slices of at most a few rows: a row of logits is as long as the vocabulary."""
    for start in range(0, count, _SCORE_ROWS):
        yield slice(start, min(start + _SCORE_ROWS, count))


def _top(logits: Floats, k: int) -> NDArray[np.int64]:
    """[rows, k] indices of the best, by rank."""
    if k == 0:
        return np.empty((len(logits), 0), np.int64)
    k = min(k, logits.shape[1])
    ids = np.argpartition(logits, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)
