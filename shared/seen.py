"""Which groups, and which of their samples, a reader has had: constant memory, for ever.

Per partition a watermark plus the sparse numbers above it, never a set of all ids: a million groups
cost 3 MB and a late duplicate is recognised however late it comes (`delivery.md` rule 5).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Unit(NamedTuple):
    """What one piece of work is about: a sample (n, i), or a whole group (n, None)."""

    n: int
    i: int | None = None


class SeenState(msgspec.Struct, frozen=True, array_like=True):
    """A Seen as plain data, small enough for a commit's metadata."""

    watermark: int = 0
    complete: bytes = b""
    """Bit b: ordinal watermark + b is complete."""
    partial: dict[int, int] = {}
    """Ordinal to the bits of the samples that were seen."""
    parked: dict[int, int] = {}
    """Ordinal to the try at which it was parked last."""

    def samples(self, k: int) -> int:
        """How many samples of groups of k it holds."""
        complete = self.watermark + int.from_bytes(self.complete, "little").bit_count()
        return complete * k + sum(bits.bit_count() for bits in self.partial.values())


class Seen:
    """The groups of one partition that are settled, and the samples of those that are not yet.

    Group n is the partition's ordinal m = n // partitions. Every ordinal below `watermark` is
    complete. Parked groups stay out: the first scored or dropped record settles them later. A park
    covers the try that it came from and earlier ones (`redrives`), not a later one.
    """

    def __init__(self, partitions: int, state: SeenState | None = None) -> None:
        state = state or SeenState()
        self._partitions = partitions
        self.watermark = state.watermark
        bits = int.from_bytes(state.complete, "little")
        self._complete = {state.watermark + b for b in range(bits.bit_length()) if bits >> b & 1}
        self._partial = dict(state.partial)
        self._parked = dict(state.parked)

    def add_group(self, n: int) -> None:
        """Group n is settled."""
        self._settle(n // self._partitions)

    def add_sample(self, n: int, i: int, k: int) -> None:
        """Sample (n, i) of a group of k was seen; with the last one the group is complete."""
        ordinal = n // self._partitions
        if self._has(ordinal):
            return
        bits = self._partial.get(ordinal, 0) | 1 << i
        if bits == (1 << k) - 1:
            self._settle(ordinal)
        else:
            self._partial[ordinal] = bits

    def park(self, n: int, redrives: int = 0) -> None:
        """Group n is in the dead letters: its old records are ignored, a redrive is not."""
        ordinal = n // self._partitions
        if not self._has(ordinal):
            self._parked[ordinal] = max(redrives, self._parked.get(ordinal, 0))

    def has(self, unit: Unit) -> bool:
        """Whether the group, or the sample, is settled."""
        ordinal = unit.n // self._partitions
        if self._has(ordinal):
            return True
        return unit.i is not None and bool(self._partial.get(ordinal, 0) >> unit.i & 1)

    def is_parked(self, n: int, redrives: int = 0) -> bool:
        """Whether this try of group n, or a later one, was parked."""
        return self._parked.get(n // self._partitions, -1) >= redrives

    def add(self, unit: Unit, k: int) -> None:
        """Settle a unit of either kind."""
        if unit.i is None:
            self.add_group(unit.n)
        else:
            self.add_sample(unit.n, unit.i, k)

    def _has(self, ordinal: int) -> bool:
        return ordinal < self.watermark or ordinal in self._complete

    def _settle(self, ordinal: int) -> None:
        self._partial.pop(ordinal, None)
        self._parked.pop(ordinal, None)
        if self._has(ordinal):
            return
        self._complete.add(ordinal)
        while self.watermark in self._complete:
            self._complete.remove(self.watermark)
            self.watermark += 1

    def state(self) -> SeenState:
        """As plain data; `Seen(partitions, state)` gives an equal one back."""
        bits = 0
        for ordinal in self._complete:
            bits |= 1 << (ordinal - self.watermark)
        return SeenState(
            self.watermark,
            bits.to_bytes((bits.bit_length() + 7) // 8, "little"),
            dict(sorted(self._partial.items())),
            dict(sorted(self._parked.items())),
        )

    def __len__(self) -> int:
        """How many groups are settled."""
        return self.watermark + len(self._complete)
