"""pass@k and pass^k against counting all subsets; errors against a simulation and closed forms."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from rollstream.services.sink.passk import (
    ks,
    mean_over_rows,
    mean_over_samples,
    pass_at_k,
    pass_hat_k,
)


@pytest.mark.parametrize("n", range(1, 8))
def test_both_equal_counting_every_subset(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_what_makes_no_sense_is_refused() -> None:
    for n, c, k in [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)]:
        with pytest.raises(ValueError, match="need"):
            pass_at_k(n, c, k)


def test_the_reported_k() -> None:
    assert ks(1) == [1]
    assert ks(8) == [1, 2, 4, 8]
    assert ks(6) == [1, 2, 4, 6]
    assert ks(0) == []


def test_error_of_independent_rows_is_the_textbook_one() -> None:
    estimate = mean_over_rows([0.0, 1.0, 1.0, 0.0])
    assert estimate is not None
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt((1 / 3) / 4))
    assert mean_over_rows([1.0]) == (1.0, None, 1)
    assert mean_over_rows([]) is None


def test_clustered_error_of_single_samples_is_the_independent_one() -> None:
    values = [0.2, 0.9, 0.4, 0.4]
    clustered = mean_over_samples([[v] for v in values])
    assert clustered == pytest.approx(mean_over_rows(values))


def test_clustered_error_covers_siblings_that_agree() -> None:
    random.seed(7)
    means, errors = [], []
    for _ in range(400):
        rows = [[float(random.random() < 0.5)] * 8 for _ in range(40)]
        estimate = mean_over_samples(rows)
        assert estimate is not None
        assert estimate.standard_error is not None
        means.append(estimate.mean)
        errors.append(estimate.standard_error)
    spread = math.sqrt(sum((m - 0.5) ** 2 for m in means) / len(means))
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)


def test_rows_without_samples_are_left_out() -> None:
    assert mean_over_samples([[1.0], []]) == (1.0, None, 1)
    assert mean_over_samples([[]]) is None
