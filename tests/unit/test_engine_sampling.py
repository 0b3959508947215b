"""Tokens from logits: the distribution, its logprobs, seeds and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstream.services.engine.sampling import choose, score_rows
from rollstream.services.engine.sequences import Sampling

VOCAB = 1000


def logits(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def generators(rows: int) -> list[np.random.Generator]:
    return [np.random.default_rng(100 + i) for i in range(rows)]


def policy(row: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1) -> np.ndarray:
    """The distribution to sample from, by sorting: temperature, then top_k, then top_p."""
    x = row.astype(np.float64) / temperature
    order = np.argsort(-x)
    if top_k:
        x[order[top_k:]] = -np.inf
    shares = np.exp(x - x.max())
    shares /= shares.sum()
    keep, mass = [], 0.0
    for token in order:
        if mass >= top_p:
            break
        keep.append(token)
        mass += shares[token]
    cut = np.zeros(VOCAB)
    cut[keep] = shares[keep]
    return cut / cut.sum()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_cut_distribution(how: dict[str, Any]) -> None:
    row, draws = logits(1)[0], 4000
    expected = policy(row, **how)
    sampling = Sampling(max_tokens=1, logprobs=0, **how)
    generator = np.random.default_rng(5)
    choices = [
        choice
        for _ in range(draws // 100)
        for choice in choose(np.tile(row, (100, 1)), [sampling] * 100, [generator] * 100)
    ]
    counts = np.bincount([c.token for c in choices], minlength=VOCAB)
    assert not counts[expected == 0].any()
    spread = np.sqrt(draws * expected * (1 - expected)) + 1
    assert np.all(np.abs(counts - draws * expected) < 5 * spread)
    for choice in choices:
        assert choice.logprob == pytest.approx(np.log(expected[choice.token]), abs=1e-5)


def test_greedy_takes_the_best_and_reports_its_logprob_at_temperature_one() -> None:
    row = logits(1)[0]
    cut = Sampling(max_tokens=1, temperature=0, top_k=1, top_p=0.1)
    (choice,) = choose(row[None].copy(), [cut], generators(1))
    whole = np.log(policy(row, temperature=1))
    assert choice.token == row.argmax()
    assert choice.logprob == pytest.approx(whole[choice.token], abs=1e-5)


def test_a_row_s_choice_does_not_depend_on_its_neighbours() -> None:
    rows = logits(6)
    hows = [Sampling(max_tokens=1, temperature=t, top_k=k)
            for t, k in [(1, 0), (0, 0), (0.3, 4), (2, 0), (1, 50), (1, 0)]]
    together = choose(rows.copy(), hows, generators(6))
    alone = [
        choose(rows[i : i + 1].copy(), [hows[i]], [generators(6)[i]])[0] for i in range(6)
    ]
    assert [c.token for c in together] == [c.token for c in alone]


def test_top_alternatives_come_by_rank_and_the_token_s_rank_counts_those_above() -> None:
    row = logits(1)[0]
    sampling = Sampling(max_tokens=1, temperature=1, logprobs=5)
    (choice,) = choose(row[None].copy(), [sampling], [np.random.default_rng(3)])
    assert [token for token, _ in choice.top] == np.argsort(-row)[:5].tolist()
    assert choice.rank == 1 + int((row > row[choice.token]).sum())
    shares = policy(row, temperature=1)
    for token, logprob in choice.top:
        assert logprob == pytest.approx(np.log(shares[token]), abs=1e-5)


def test_an_unlikely_draw_never_leaves_what_was_kept() -> None:
    class Last(np.random.Generator):
        def random(self, *_: Any, **__: Any) -> Any:
            return np.nextafter(1.0, 0.0)

    row = np.full((1, VOCAB), -30, np.float32)
    row[0, 7] = 5
    sampling = Sampling(max_tokens=1, temperature=1, top_k=1)
    (choice,) = choose(row, [sampling], [Last(np.random.PCG64(0))])
    assert (choice.token, choice.logprob) == (7, pytest.approx(0))


@pytest.mark.parametrize("k", [0, 1, 8])
def test_scores_of_given_tokens(k: int) -> None:
    rows = logits(5)
    targets = np.array([0, 3, 500, int(rows[3].argmax()), 999])
    scores = score_rows(rows.copy(), targets, k)
    for i, row in enumerate(rows):
        reference = np.log(policy(row, temperature=1))
        order = np.argsort(-row)
        assert scores.own[i] == pytest.approx(reference[targets[i]], abs=1e-5)
        assert scores.rank[i] == 1 + int((row > row[targets[i]]).sum())
        assert scores.top_ids[i].tolist() == order[:k].tolist()
        np.testing.assert_allclose(scores.top_logprobs[i], reference[order[:k]], atol=1e-5)
