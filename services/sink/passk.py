"""pass@k, pass^k and their errors, from how many of a row's samples passed. Pure.

pass@k: the chance that at least one of k samples passes, unbiased, from n samples of which c passed
(Chen et al. 2021, "Evaluating large language models trained on code", eq. 1). pass^k: the chance
that all k pass (Yao et al. 2024, "tau-bench"). Rows with fewer than k samples say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over rows, its standard error clustered by row, and how many rows it rests on."""

    mean: float
    standard_error: float | None
    """None where there are fewer than two rows."""
    rows: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k). Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """C(c, k) / C(n, k). Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}: need 0 <= c <= n and 1 <= k <= n")


def ks(k: int) -> list[int]:
    """The k that are reported: the powers of two up to k, and k itself."""
    powers = [1 << bit for bit in range(k.bit_length())]
    return powers if powers and powers[-1] == k else [*powers, k] if k > 0 else []


def mean_over_rows(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a row; None without rows.

    The standard error is that of the mean of independent rows, sqrt(var / rows).
    """
    rows = len(values)
    if not rows:
        return None
    mean = math.fsum(values) / rows
    if rows < 2:
        return Estimate(mean, None, rows)
    variance = math.fsum((value - mean) ** 2 for value in values) / (rows - 1)
    return Estimate(mean, math.sqrt(variance / rows), rows)


def mean_over_samples(clusters: Sequence[Sequence[float]]) -> Estimate | None:
    """The mean of all samples, its error clustered by row: siblings are not independent.

    sqrt(sum over rows of (sum of residuals)^2) / samples, times sqrt(rows / (rows - 1)) (Miller
    2024, "Adding error bars to evals", eq. 4, with the usual small-sample factor).
    """
    filled = [cluster for cluster in clusters if cluster]
    rows, samples = len(filled), sum(len(cluster) for cluster in filled)
    if not rows:
        return None
    mean = math.fsum(value for cluster in filled for value in cluster) / samples
    if rows < 2:
        return Estimate(mean, None, rows)
    squares = math.fsum(
        (math.fsum(cluster) - mean * len(cluster)) ** 2 for cluster in filled
    )
    return Estimate(mean, math.sqrt(squares * rows / (rows - 1)) / samples, rows)
