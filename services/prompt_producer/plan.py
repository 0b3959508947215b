"""Which row group n is: a pure function of seed, weights and number of rows.

Environments are mixed by weight, in groups: a fixed cycle in which each comes as often as its
weight says, spread evenly. Within an environment rows come in file order, or shuffled anew each
epoch where a shuffle seed is given.
"""

from __future__ import annotations

import hashlib
import random
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from rollstream.shared.runs import RunConfig

LONGEST_CYCLE = 1000


class Place(NamedTuple):
    """Where group n comes from."""

    source: int
    """Index into the run's environments."""
    row_index: int
    epoch: int


class Plan:
    """The order of a run's groups.

    `rows` holds the number of rows of each source.
    """

    def __init__(self, rows: list[int], weights: list[float], shuffle_seed: int | None) -> None:
        if not rows or len(rows) != len(weights) or min(rows) < 1 or min(weights) <= 0:
            raise ValueError(f"a plan needs rows and positive weights, not {rows}, {weights}")
        self._rows = rows
        self._cycle = mixing_cycle(weights)
        self._shuffle_seed = shuffle_seed

    def place(self, n: int) -> Place:
        """Where group n comes from."""
        lap, at = divmod(n, len(self._cycle))
        source = self._cycle[at]
        before = self._cycle[:at].count(source)
        nth = lap * self._cycle.count(source) + before
        epoch, position = divmod(nth, self._rows[source])
        row = position
        if self._shuffle_seed is not None:
            row = _shuffled(self._rows[source], f"{self._shuffle_seed}/{source}/{epoch}")[position]
        return Place(source, row, epoch)

    def groups(self, epochs: int) -> int:
        """The number of the first group that is beyond so many epochs of every source."""
        laps = [
            Fraction(rows * epochs, self._cycle.count(source))
            for source, rows in enumerate(self._rows)
        ]
        return sum(
            1 for n in range(int(max(laps)) * len(self._cycle) + len(self._cycle))
            if self.place(n).epoch < epochs
        ) if len(self._rows) > 1 else self._rows[0] * epochs


def mixing_cycle(weights: list[float]) -> list[int]:
    """Source indices in the order in which groups take them, over and over."""
    whole = sum(weights)
    shares = [Fraction(w / whole).limit_denominator(LONGEST_CYCLE // 10) for w in weights]
    shares = [max(share, Fraction(1, LONGEST_CYCLE // 10)) for share in shares]
    length = lcm(*(share.denominator for share in shares))
    if length > LONGEST_CYCLE:
        counts = [max(1, round(float(share) * LONGEST_CYCLE)) for share in shares]
    else:
        counts = [int(share * length) for share in shares]
    total = sum(counts)
    taken = [0] * len(counts)
    cycle = []
    for position in range(1, total + 1):
        owed = [Fraction(count * position, total) - had
                for count, had in zip(counts, taken, strict=True)]
        source = max(range(len(counts)), key=lambda s: (owed[s], -s))
        taken[source] += 1
        cycle.append(source)
    return cycle


@lru_cache(maxsize=8)
def _shuffled(rows: int, seed: str) -> list[int]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return order


def request_seed(run_seed: int, n: int, i: int) -> int:
    """A sample's request seed: the same on every attempt, another one for each sibling."""
    digest = hashlib.blake2b(f"{run_seed}/{n}/{i}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFF_FFFF


def last_group(run: RunConfig, plan: Plan) -> int | None:
    """How many groups the run has rows for, None where it repeats for ever."""
    epochs = run.epochs
    if epochs is None and run.pipeline == "eval":
        epochs = 1
    limit = plan.groups(epochs) if epochs is not None else None
    if run.pipeline == "eval" and run.total_groups is not None:
        return min(run.total_groups, limit) if limit is not None else run.total_groups
    return limit
